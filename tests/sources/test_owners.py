"""Attributes of a run, a unit, its window and its step's state are assigned in their own module only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWNERS = {
    "run": "accel_core/runtime/run.py",
    "prepared": "accel_core/contract/prepared.py",
    "unit": "accel_core/contract/unit.py",
    "window": "accel_core/contract/window.py",
    "step_state": "accel_core/training/step_state.py",
    "checkpoints": "accel_core/checkpoint/session.py",
    "series": "accel_core/checkpoint/retention.py",
}
"""What variables and attributes that hold such an object are called -> the module that may write it."""
FILES = sorted(
    file
    for folder in ("accel_core", "backends", "contrib")
    for file in (ROOT / folder).rglob("*.py")
    if "tests" not in file.relative_to(ROOT).parts
)


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def foreign_writes(source: str, file: str) -> Iterator[str]:
    """What a file assigns or deletes of an object that another module owns."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner = OWNERS.get(last_name(node.value).lstrip("_"), file)
            if owner != file:
                yield f"{file}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("folder", sorted({file.relative_to(ROOT).parts[:2] for file in FILES}), ids="/".join)
def test_only_its_own_module_writes_a_run_unit_or_window(folder: tuple[str, str]) -> None:
    found = [
        write
        for file in FILES
        if file.relative_to(ROOT).parts[:2] == folder
        for write in foreign_writes(file.read_text(encoding="utf-8"), str(file.relative_to(ROOT)))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    ["self.run.units = []", "unit.window.index += 1", "for run.device in (): pass", "del self._unit.scaler"],
)
def test_a_write_from_elsewhere_would_be_seen(source: str) -> None:
    assert list(foreign_writes(source, "elsewhere.py"))


def test_what_an_object_lets_others_call_is_no_write() -> None:
    assert not list(foreign_writes("unit.wrapped.append(model)\nunit.wrapped[0] = model", "elsewhere.py"))
