"""Names that are private to torch, and to the libraries of backends, are still there in what is installed."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

WORKSPACE = Path(__file__).parents[2]
PACKAGES = {
    "core": WORKSPACE / "accel_core",
    **{
        path.parent.name: path for kind in ("backends", "contrib") for path in WORKSPACE.glob(f"{kind}/*/src")
    },
}
LIBRARIES = {
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "xla": "torch_xla",
    "transformer-engine": "transformer_engine",
    "fsdp": "transformers",
    "compat": "transformers",
    "big-models": "transformers",
    "bitsandbytes": "bitsandbytes",
    "sagemaker": "sagemaker",
}
PYTHONS = {"_actions", "_current_frames", "_exit", "_getframe", "_register_atexit", "_run_exitfuncs"}
"""Of the standard library."""
RECORD = json.loads((WORKSPACE / "tests" / "sources" / "torch_names.json").read_text(encoding="utf-8"))
NEWER = {name.rpartition(".")[2] for name in RECORD["guarded"]}
"""What the sources do without where torch is older."""
LEFT_OUT = {"_inductor", "_refs", "onnx", "testing"}
"""Folders of torch where the same word may mean something else."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_in(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(private name, whether it is made here) for each that is used."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=context):
                yield name, not isinstance(context, ast.Load)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
                yield name, True
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, True
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield name, False
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                yield from ((part, False) for part in [*module.split("."), *(each.name for each in names)])


def with_default(tree: ast.AST) -> Iterator[str]:
    """The names that are read by a `getattr` that says what to take where they are not there."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), _]):
                yield name


@cache
def trees(package: str) -> list[ast.AST]:
    files = [path for path in PACKAGES[package].rglob("*.py") if "templates" not in path.parts]
    return [ast.parse(path.read_text(encoding="utf-8")) for path in files]


@cache
def used_and_made(package: str) -> tuple[set[str], set[str]]:
    found = [pair for tree in trees(package) for pair in names_in(tree)]
    return {name for name, made in found if is_private(name) and not made}, {
        name for name, made in found if made
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


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_private_names_of_libraries_are_there(package):
    used, _ = used_and_made(package)
    ours = set().union(*(used_and_made(name)[1] for name in PACKAGES))
    bindings = {*dir(torch._C), *dir(sys.modules.get("torch._C._distributed_c10d"))}
    missing = used - ours - PYTHONS - words("torch") - bindings
    if ".".join(torch.__version__.split(".")[:2]) in RECORD["newer"]:
        missing -= NEWER.union(*(with_default(tree) for tree in trees(package)))
    library = LIBRARIES.get(package)
    spec = find_spec(library) if library else None
    if missing and library and (spec is None or "stand_in" in str(spec.origin)):
        pytest.skip(f"{library} is not installed")
    assert sorted(missing - (words(library) if library else set())) == []


def test_a_name_that_is_nowhere_is_found():
    tree = ast.parse("from torch.nn._gone import x\nx._gone_too\nself._mine = x._mine")
    used = {name for name, made in names_in(tree) if is_private(name) and not made}
    assert used - words("torch") == {"_gone", "_gone_too", "_mine"}
