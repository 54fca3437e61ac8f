"""Core has no method for the drop-in package alone: what only that package needs is in its own subclasses."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from checkout import ROOT, modules, packages, place, refuse, text, tree

import accel_core

SURFACE = {"total_dataset_length"}
"""Attributes of prepared objects that Accelerate documents, and so programs may read."""


def public_functions(file: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of each public function and method of a module."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.lineno, node.name


def names_used(files: Iterable[Path]) -> set[str]:
    """Every name, attribute, import and identifier in quotes of these modules."""
    found = set[str]()
    for file in files:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.alias):
                found.add(node.name.rpartition(".")[2])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def documented() -> set[str]:
    """Names after a dot in the README and the pages of docs/: a user may call them."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {word.partition("(")[0].strip("`.,:)") for page in pages for word in _dotted(text(page))}


def _dotted(page: str) -> Iterator[str]:
    for word in page.split():
        if "." in word:
            yield word.partition("(")[0].rpartition(".")[2]


def test_no_function_of_core_is_called_by_the_drop_in_package_alone() -> None:
    compat = set(packages()["accel_compat"])
    theirs = names_used(compat)
    others = names_used(set(modules()) - compat) | documented() | {*accel_core.__all__} | SURFACE
    refuse(
        (
            f"{place(file, line)}: {name}"
            for file in packages()["accel_core"]
            for line, name in public_functions(file)
            if name in theirs - others
        ),
        "a function of core that accel-compat alone calls: put it in a subclass there",
    )
