"""Compare the names of torch that the project uses with releases of torch that are not installed.

accel-core accepts several releases of torch, and most tests run on one. This reads the sources by syntax tree
for each name of torch, private ones included, and for the arguments of each call. The record beside the tests
holds what older releases have of these names, with which parameters, and which members of the newest release
they lack: a syntax tree has no types, so an attribute of some object is looked for among those.

`python tools/torch_names.py` writes what the installed torch has into the record. It needs nothing but torch:

    uv run --no-project --with torch==2.8.0 --with numpy tools/torch_names.py --newest FOLDER

FOLDER is where the newest torch is, needed to compare members again. `--check` compares the sources with the
installed torch, and with the record; `tests/repository/test_torch_names.py` does too.
"""
# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "repository" / "torch_names.json"
SOURCES = ("accel_core/**/*.py", "*/*/src/**/*.py", "tools/*.py", "benchmarks/**/*.py")
VENDORS = ("torch.hpu", "torch.mlu", "torch.musa", "torch.npu", "torch.sdaa", "torch.backends.mudnn")
"""Modules that vendors' packages add to torch."""
STUBS = ("_VariableFunctions", "__init__", "_nn", "_distributed_c10d")
"""Stubs in torch/_C that have the parameters of what is written in C++."""
ASIDE = {"_dynamo", "_export", "_functorch", "_inductor", "_refs", "ao", "export", "fx", "onnx", "testing"}
"""Folders of torch whose classes the project does not meet."""
WORD = re.compile(rb"[A-Za-z_]\w*")

Signatures = list[str] | None
"""Those of a name: none if unknown, as for constants; None: the name is not there."""


class Use(NamedTuple):
    """A name of torch in a source; `arguments` are those of a call: how many, and by which keywords."""

    name: str
    place: str
    arguments: tuple[int, tuple[str, ...]] | None = None


# -- the sources ---------------------------------------------------------------------------------


def files() -> list[Path]:
    """List the sources that the record is about."""
    return sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)})


def uses(source: str, file: str) -> Iterator[Use]:
    """Find each name of torch in a module, as torch calls it."""
    tree = ast.parse(source)
    imported = [pair for node in ast.walk(tree) for pair in _imported(node)]
    yield from (Use(name, file) for _, name in imported)
    for use in _used(tree, {alias: "torch" if alias == "torch" else name for alias, name in imported}):
        yield use._replace(place=f"{file}:{use.place}")


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(what it is called here, its name in torch) for each name that a statement imports."""
    if isinstance(node, ast.Import):
        yield from ((each.asname or "torch", each.name) for each in node.names if _is_torch(each.name))
    elif isinstance(node, ast.ImportFrom) and node.module and _is_torch(node.module):
        yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _used(node: ast.AST, aliases: dict[str, str]) -> Iterator[Use]:
    inner: Iterator[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Call) and (name := _dotted(node.func, aliases)):
        unknown = any(isinstance(each, ast.Starred) for each in node.args)
        unknown = unknown or any(each.arg is None for each in node.keywords)
        arguments = len(node.args), tuple(str(each.arg) for each in node.keywords)
        yield Use(name, str(node.lineno), None if unknown else arguments)
        inner = iter([*node.args, *node.keywords])
    elif isinstance(node, ast.Attribute | ast.Name) and (name := _dotted(node, aliases)):
        yield Use(name, str(node.lineno))
        return
    for child in inner:
        yield from _used(child, aliases)


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value, aliases)
        return before and f"{before}.{node.attr}"
    return aliases.get(node.id) if isinstance(node, ast.Name) else None


def members(sources: dict[str, str]) -> dict[str, str]:
    """Find each attribute and keyword that the sources read and make nowhere, with a place where they do."""
    read: dict[str, str] = {}
    made = set()
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Load()):
                    read[name] = f"{file}:{node.lineno}"
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(str(name)), *_]):
                    read[name] = f"{file}:{node.lineno}"
                case ast.keyword(arg=str(name), value=value):
                    read[name] = f"{file}:{value.lineno}"
                case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                    made.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    made.add(name)
    return {name: place for name, place in read.items() if name not in made}


# -- the comparison ------------------------------------------------------------------------------


def problems(sources: dict[str, str], record: dict[str, Any]) -> list[str]:
    """Say what the sources use that a release in the record lacks.

    A name may be declared as guarded, with how the sources do without it.
    """
    found = [*lacking(sources, record)]
    unused = record["guarded"].keys() - {name for name, _ in found}
    texts = [text for name, text in found if name not in record["guarded"]]
    return texts + [f"guarded: {name} is lacking nowhere" for name in sorted(unused)]


def lacking(sources: dict[str, str], record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Find (name, where it is used and what is wrong) for what a release lacks, guarded or not."""
    every = [use for file, source in sources.items() for use in uses(source, file)]
    ours = [use for use in every if not use.name.startswith(VENDORS)]
    read = members(sources)
    known: dict[str, Signatures] = {}
    for release, newer in record["newer"].items():  # what is recorded for an older one alone counts here too
        known |= {name: each[release] for name, each in record["names"].items() if release in each}
        for use in ours:
            if said := misuse(use, known):
                yield use.name, f"{use.place}: {use.name} {said} in torch {release}"
        for name in sorted(read.keys() & {*newer.split()}):
            yield name, f"{read[name]}: {name} is a member that torch {release} has not"


def misuse(use: Use, known: dict[str, Signatures]) -> str | None:
    """Say why the use of a name fails, by what is known of one release; None if it works."""
    if use.name not in known:
        return "is not recorded (python tools/torch_names.py, where that is installed)"
    signatures = known[use.name]
    if signatures is None:
        return "is not there"
    if use.arguments is None or not signatures:
        return None
    errors = [_unbound(text, *use.arguments) for text in signatures]
    return None if None in errors else f"({errors[0]}) is called otherwise"


def _unbound(signature: str, count: int, keywords: tuple[str, ...]) -> str | None:
    try:
        _parameters(signature).bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return None


@cache
def _parameters(text: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {text}: None"))  # noqa: S307 - the record's, or torch's own


# -- torch ---------------------------------------------------------------------------------------


class _Dots:
    """A default value, whatever it is."""

    def __repr__(self) -> str:
        return "..."


def installed(name: str) -> Signatures:
    """Read the signatures that the installed torch has for a name."""
    try:
        value = _resolved(name)
    except ModuleNotFoundError as error:  # a module may need another library
        return None if _is_torch(error.name or "torch") else []
    except (AttributeError, ImportError):
        return None
    try:
        parameters = inspect.signature(value).parameters.values() if callable(value) else None
    except (TypeError, ValueError):
        name = getattr(value, "__name__", "")
        return _stubs().get(f"{name}.__init__" if inspect.isclass(value) else name, [])
    if parameters is None:
        return []
    plain = [each.replace(annotation=each.empty) for each in parameters]
    plain = [each if each.default is each.empty else each.replace(default=_Dots()) for each in plain]
    return [str(inspect.Signature(plain))[1:-1]]


def _resolved(name: str) -> Any:
    """Import a name as `from ... import` would: a member of a module, else a module."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            value = import_module(module)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or "torch"):
                raise
            continue
        for part in parts[count:]:
            if inspect.ismodule(value) and not hasattr(value, part):
                return import_module(name)
            value = None if value is None else getattr(value, part)  # None is set later: the default group
        return value
    return import_module(name)


@cache
def _stubs() -> dict[str, list[str]]:
    """Read the parameters of each function and class of torch's stubs, overloads one by one."""
    found: dict[str, list[str]] = {}
    for stub in STUBS:
        for node in ast.parse((_folder() / "_C" / f"{stub}.pyi").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(_written(node.args, 0))
            for each in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    found.setdefault(f"{node.name}.__init__", []).append(_written(each.args, 1))
    return found


def _written(parameters: ast.arguments, first: int) -> str:
    """Write the parameters from the `first` one on, without annotations and values."""
    for each in ast.walk(parameters):
        if isinstance(each, ast.arg):
            each.annotation = None
    del (parameters.posonlyargs or parameters.args)[:first]
    parameters.defaults = [ast.Constant(...) for _ in parameters.defaults]
    parameters.kw_defaults = [each and ast.Constant(...) for each in parameters.kw_defaults]
    return ast.unparse(parameters)


def _folder() -> Path:
    return Path(str(import_module("torch").__file__)).parent


def newer(newest: Path, older: Path) -> str:
    """List the members of the newest torch's classes whose names are nowhere in an older torch."""
    defined = set()
    for file in newest.rglob("*.py*"):
        if file.suffix in (".py", ".pyi") and not ASIDE & {*file.relative_to(newest).parts}:
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.ClassDef):
                    defined |= {*_defined(node)}
    words = {
        word
        for file in older.rglob("*.py*")
        if file.suffix in (".py", ".pyi")
        for word in WORD.findall(file.read_bytes())
    }
    return " ".join(sorted(defined - {word.decode() for word in words}))


def _defined(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        match each:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                yield name


# -- the command ---------------------------------------------------------------------------------


def read_sources() -> dict[str, str]:
    """Read the sources of the checkout."""
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files()}


def read_record() -> dict[str, Any]:
    """Read the record; what is the same in all releases is written once."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    for name, each in record["names"].items():
        record["names"][name] = each if isinstance(each, dict) else dict.fromkeys(record["newer"], each)
    return record


def write(record: dict[str, Any]) -> None:
    """Write the record, with a line for each name."""
    lines = []
    for name, each in sorted(record["names"].items()):
        one = next(iter(each.values()))
        same = each.keys() == record["newer"].keys() and all(other == one for other in each.values())
        lines.append(f"    {json.dumps(name)}: {json.dumps(one if same else each, sort_keys=True)}")
    rest = json.dumps({key: record[key] for key in ("guarded", "newer")}, indent=2)
    text = ",\n".join(lines)
    RECORD.write_text(f'{rest[:-2]},\n  "names": {{\n{text}\n  }}\n}}\n', encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Write the installed torch into the record, or with --check compare."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if torch has not what the sources use"
    )
    parser.add_argument("--newest", type=Path, help="the folder of the newest torch, to compare members with")
    given = parser.parse_args(arguments)
    release = ".".join(import_module("torch").__version__.split(".")[:2])
    sources, record = read_sources(), read_record()
    names = {use.name for file, source in sources.items() for use in uses(source, file)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        here = {name: installed(name) for name in sorted(names)}
    if given.check:
        return _check(sources, record, here, release)
    if release not in record["newer"] and not given.newest:
        raise SystemExit(
            f"torch {release} is not on record\nto add it, give the folder of a newer one: --newest"
        )
    record["names"] = {name: {**record["names"].get(name, {}), release: here[name]} for name in names}
    if given.newest:
        record["newer"][release] = newer(given.newest, _folder())
        in_order = sorted(record["newer"], key=lambda each: [int(part) for part in each.split(".")])
        record["newer"] = {each: record["newer"][each] for each in in_order}
    write(record)
    return 0


def _check(sources: dict[str, str], record: dict[str, Any], here: dict[str, Signatures], release: str) -> int:
    """Compare the sources with the installed torch, and what the record says of this release with it."""
    this = {"newer": {release: ""}, "names": {name: {release: each} for name, each in here.items()}}
    wrong = [text for name, text in lacking(sources, this) if name not in record["guarded"]]
    for name, found in here.items():
        known = record["names"].get(name, {}).get(release, found)
        if known != found and [] not in (known, found):  # an environment may have no tensorboard, for example
            wrong.append(f"{name}: torch {release} has {found}, the record {known}")
    print("\n".join(wrong) or f"torch {release} has all {len(here)} names")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
