"""Packages outside core use what core exports, and nothing else of it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import accel_core

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {*accel_core.__all__, "__version__", "hooks", "ops"}
SOURCES = sorted([*ROOT.glob("backends/*/src/**/*.py"), *ROOT.glob("contrib/*/src/**/*.py")])


def private_doors(source: str) -> Iterator[str]:
    """Each name that the source imports of core and that is not public, for types or in functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (name for name in names if name.startswith("accel_core."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "accel_core":
            for alias in node.names:
                if node.module != "accel_core" or alias.name not in PUBLIC:
                    yield f"{node.module}.{alias.name}"


def test_there_are_packages_to_look_at() -> None:
    found = {source.parent.name for source in SOURCES}

    assert {"accel_ddp", "accel_cuda", "accel_tensorboard"} <= found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_comes_in_by_the_public_doors(source: Path) -> None:
    assert list(private_doors(source.read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        "from accel_core.runtime.run import Run",
        "import accel_core.contract.unit",
        "def f():\n    from accel_core.defaults import base",
        "from accel_core import defaults",
    ],
)
def test_a_private_door_would_be_seen(line: str) -> None:
    assert list(private_doors(line)) != []


def test_no_two_helpers_are_called_alike() -> None:
    # Tests import them by their bare names, from every folder with tests (conftest.py of the root).
    folders = [folder for pattern in ("tests", "*/*/tests") for folder in ROOT.glob(pattern)]
    files = [file for folder in folders for file in folder.glob("**/*.py")]
    places = {file.parent for file in files if file.name.startswith(("test_", "conftest"))}
    helpers = [file.name for place in places for file in place.glob("*.py")]
    names = Counter(name for name in helpers if not name.startswith(("test_", "conftest")))

    assert [name for name, count in names.items() if count > 1] == []
