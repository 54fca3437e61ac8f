"""The files of this checkout, each parsed once, and how a rule reports offences against it."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@cache
def packages() -> dict[str, list[Path]]:
    """Each package of this repository, by the name that one imports -> its modules."""
    folders = [ROOT / "accel_core", *sorted(ROOT.glob("*/*/src/accel_*"))]
    found = {folder.name: sorted(folder.rglob("*.py")) for folder in folders}
    assert {"accel_core", "accel_ddp", "accel_trackers"} <= found.keys()
    return found


def modules() -> list[Path]:
    """The modules of all packages."""
    return [file for files in packages().values() for file in files]


@cache
def text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def tree(file: Path) -> ast.Module:
    gc.disable()  # else it goes through all trees that are kept, again and again
    try:
        return ast.parse(text(file))
    finally:
        gc.enable()


def place(file: Path, line: int) -> str:
    """file:line, as editors open it."""
    return f"{file.relative_to(ROOT).as_posix()}:{line}"


def refuse(offences: Iterable[str], remedy: str) -> None:
    """Fail with a line for each offence, under what to do about it."""
    found = list(offences)
    if found:
        pytest.fail("\n".join([f"{len(found)} x {remedy}", *found]), pytrace=False)


@cache
def tool(name: str) -> ModuleType:
    """Import a program of tools/."""
    spec = spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # where the types of its classes are looked up
    spec.loader.exec_module(module)
    return module
