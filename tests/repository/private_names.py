"""The private names of libraries that the packages use, and those that an installed library has."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from checkout import ROOT, packages, place, tree

LIBRARIES = {
    "accel_deepspeed": "deepspeed",
    "accel_megatron": "megatron",
    "accel_xla": "torch_xla",
    "accel_transformer_engine": "transformer_engine",
    "accel_fsdp": "transformers",
    "accel_compat": "transformers",
    "accel_context_parallel": "transformers",
    "accel_big_models": "transformers",
    "accel_bitsandbytes": "bitsandbytes",
    "accel_sagemaker": "sagemaker",
}
"""Package -> the library beside torch whose private names it uses."""
PYTHONS = {"_actions", "_current_frames", "_exit", "_getframe", "_register_atexit", "_run_exitfuncs"}
"""Of the standard library."""
RECORD = json.loads((ROOT / "tests" / "repository" / "torch_names.json").read_text(encoding="utf-8"))
GUARDED = {name.rpartition(".")[2] for name in RECORD["guarded"]}
"""What the sources do without where torch is older."""
LEFT_OUT = {"_inductor", "_refs", "onnx", "testing"}
"""Folders of torch where the same word may mean something else."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_in(module: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """(private name, line, whether it is made here) for each that is used."""
    for node in ast.walk(module):
        found: list[tuple[str, bool]] = []
        match node:
            case ast.Attribute(attr=name, ctx=context):
                found = [(name, not isinstance(context, ast.Load))]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
                found = [(name, True)]
            case ast.Name(id=name, ctx=ast.Store()):
                found = [(name, True)]
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found = [(name, False)]
            case ast.ImportFrom(module=str(path), names=names) if path.startswith("torch"):
                found = [(part, False) for part in [*path.split("."), *(each.name for each in names)]]
        yield from ((name, getattr(node, "lineno", 0), made) for name, made in found if is_private(name))


def with_default(module: ast.AST) -> Iterator[str]:
    """The names that are read by a `getattr` that says what to take where they are not there."""
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), _]):
                yield name


@cache
def used(package: str) -> dict[str, str]:
    """Private name that the modules of a package read -> the first place."""
    found: dict[str, str] = {}
    for file in packages()[package]:
        for name, line, made in names_in(tree(file)):
            if not made:
                found.setdefault(name, place(file, line))
    return found


@cache
def made() -> set[str]:
    """Private names that a module of ours makes."""
    return {
        name
        for files in packages().values()
        for file in files
        for name, _, is_made in names_in(tree(file))
        if is_made
    }


@cache
def words(library: str) -> set[str]:
    """The private names in the sources of a library; of none that is not installed."""
    spec = find_spec(library)
    folders = [Path(each) for each in (spec and spec.submodule_search_locations) or ()]
    files = [(folder, path) for folder in folders for path in folder.rglob("*.py*")]
    # Only folders within the library count: an environment may be called "testing".
    read = [
        path
        for folder, path in files
        if path.suffix in (".py", ".pyi") and not LEFT_OUT & {*path.relative_to(folder).parts}
    ]
    return {word.decode() for path in read for word in set(re.findall(rb"\b_[A-Za-z]\w*", path.read_bytes()))}


def lacking(package: str) -> dict[str, str]:
    """Private name of a package that neither we, Python nor the installed torch has -> a place."""
    torch = import_module("torch")
    bindings = {*dir(torch._C), *dir(sys.modules.get("torch._C._distributed_c10d"))}
    fine = made() | PYTHONS | words("torch") | bindings
    if ".".join(torch.__version__.split(".")[:2]) in RECORD["newer"]:
        fine |= GUARDED.union(*(with_default(tree(file)) for file in packages()[package]))
    return {name: where for name, where in used(package).items() if name not in fine}
