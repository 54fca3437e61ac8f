"""Packages outside core use what core exports, and nothing else of it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("backends/*/src/**/*.py"), *ROOT.glob("contrib/*/src/**/*.py")])


def modules_of_core(source: str) -> Iterator[str]:
    """Each module of core that the source imports, for types or in functions too."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        yield from (name for name in names if name.partition(".")[0] == "accel_core")


KIT: Final = {
    f"accel_core.{module}"
    for module in (
        "config.jsonschema",
        "contract.card",
        "contract.options",
        "contract.run",
        "contract.suggest",
        "checkpoint.export",
        "distributed.tensor_bytes",
        "plugins.discovery",
        "plugins.known",
    )
}
"""What the conformance kit looks at behind the doors, to judge plugins as core does."""


def is_public(module: str, source: Path | None = None) -> bool:
    return module == "accel_core" or (
        source is not None and "accel_testing" in source.parts and module in KIT
    )


def test_there_are_packages_to_look_at() -> None:
    found = {source.parent.name for source in SOURCES}

    assert {"accel_ddp", "accel_cuda", "accel_tensorboard"} <= found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_comes_in_by_the_public_doors(source: Path) -> None:
    assert [name for name in modules_of_core(source.read_text()) if not is_public(name, source)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from accel_core.runtime.run import Run",
        "import accel_core.contract.unit",
        "def f():\n    from accel_core.defaults import base",
    ],
)
def test_a_private_door_would_be_seen(line: str) -> None:
    assert [name for name in modules_of_core(line) if not is_public(name)] != []


def test_no_two_test_files_are_called_alike() -> None:
    # pytest imports them by their bare names, so that the checkout is not on the path beside the wheels.
    folders = [folder for pattern in ("tests", "*/*/tests") for folder in ROOT.glob(pattern)]
    names = Counter(file.name for folder in folders for file in folder.glob("**/test_*.py"))

    assert [name for name, count in names.items() if count > 1] == []
