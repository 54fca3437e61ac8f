"""A package requires the libraries that its modules import at once; what it imports late may be optional."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(file.parent for file in (ROOT / "pyproject.toml", *ROOT.glob("*/*/pyproject.toml")))
MODULE = {"pyyaml": "yaml"}
"""Distribution -> the module it is imported as, where that is another name."""


def required(package: Path) -> set[str]:
    """Return the modules of what a package requires, itself, and torch, which core requires for all."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.match(r"[\w-]+", line)[0] for line in project["dependencies"]]
    return {"torch", *(MODULE.get(name, name).replace("-", "_") for name in [project["name"], *names])}


def imported(package: Path) -> set[str]:
    """Return the modules of other distributions that a package imports where nothing guards it."""
    found = set()
    for file in (package / ("accel_core" if package == ROOT else "src")).rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                found |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module)
    return {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_requires_what_it_imports(package):
    assert imported(package) - required(package) == set()


def test_a_library_that_is_not_required_is_found(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.py").write_text("import sys, yaml\nfrom attrs import field\nimport rich.text\n")
    (tmp_path / "pyproject.toml").write_text(
        'project = {name = "one", dependencies = ["pyyaml>=6", "attrs"]}'
    )
    assert imported(tmp_path) - required(tmp_path) == {"rich"}
