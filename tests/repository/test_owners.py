"""Attributes of a run, a unit, its window and its step's state are assigned in their own module only."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from checkout import ROOT, modules, place, refuse, tree

OWNERS = {
    "run": "accel_core/runtime/run.py",
    "prepared": "accel_core/training/prepared.py",
    "unit": "accel_core/contract/unit.py",
    "window": "accel_core/contract/window.py",
    "step_state": "accel_core/training/step_state.py",
    "names": "accel_core/training/names.py",
    "checkpoints": "accel_core/checkpoint/session.py",
    "series": "accel_core/storage/series.py",
}
"""Name of variables and attributes that hold such an object -> the module that may write its attributes."""
FREE = {"accumulation", "windows", "run_id"}
"""Attributes of a run that are assigned where they change: by `accumulate`, and by a load."""


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def writes(module: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, what is assigned or deleted, its owner) for each attribute of an object that has an owner."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner = OWNERS.get(last_name(node.value).lstrip("_"))
            if owner and node.attr not in FREE:
                yield node.lineno, ast.unparse(node), owner


def test_only_its_own_module_writes_an_attribute_of_a_run_a_unit_or_a_window() -> None:
    refuse(
        (
            f"{place(file, line)}: {target}, which belongs to {owner}"
            for file in modules()
            for line, target, owner in writes(tree(file))
            if file != ROOT / owner
        ),
        "an attribute of another module's object is written: call a method of the object",
    )


def test_each_owner_is_a_module() -> None:
    refuse((it for it in OWNERS.values() if not (ROOT / it).is_file()), "a module that is gone: edit OWNERS")


def test_assignments_and_deletions_are_writes_and_calls_are_not() -> None:
    for source in (
        "self.run.units = []",
        "unit.window.index += 1",
        "for run.device in (): pass",
        "del self._unit.scaler",
    ):
        assert list(writes(ast.parse(source))), source
    assert not list(writes(ast.parse("unit.wrapped.append(model)\nunit.wrapped[0] = model")))
