"""Packages import what core exports, what they require, and nothing in a circle."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from checkout import ROOT, modules, packages, place, refuse, tree

import accel_core

PUBLIC = {*accel_core.__all__, "__version__", "hooks", "ops"}
DISTRIBUTED_AS = {"yaml": "pyyaml"}
"""Module -> the distribution that has it, where that is called otherwise."""


def private_doors(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each name that a module imports of core and that is not public, for types too."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, it.name) for it in node.names if it.name.startswith("accel_core."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "accel_core":
            for alias in node.names:
                if node.module != "accel_core" or alias.name not in PUBLIC:
                    yield node.lineno, f"{node.module}.{alias.name}"


def test_packages_outside_core_import_only_what_core_exports() -> None:
    outside = [file for file in modules() if not file.is_relative_to(ROOT / "accel_core")]
    refuse(
        (f"{place(file, line)}: {name}" for file in outside for line, name in private_doors(tree(file))),
        "a name that core keeps private: import what accel_core/__init__.py exports, or export it there",
    )


def test_an_import_of_a_private_name_is_seen_wherever_it_stands() -> None:
    for source in (
        "from accel_core.runtime.run import Run",
        "import accel_core.contract.unit",
        "def f():\n    from accel_core.defaults import base",
        "from accel_core import defaults",
    ):
        assert list(private_doors(ast.parse(source))), source


def required(package: Path) -> set[str]:
    """The distributions that a package may import at once: its own, what it requires, and core's torch."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]
    names = [re.match(r"[\w-]+", line)[0] for line in project["dependencies"]]
    return {"torch", project["name"], *(name.replace("_", "-") for name in names)}


def imported_at_once(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, distribution) of each import that runs when the module is imported, and that nothing guards."""
    for node in module.body:
        names = [it.name for it in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        for top in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names):
            yield node.lineno, DISTRIBUTED_AS.get(top, top.replace("_", "-"))


def test_a_package_requires_the_libraries_that_its_modules_import_at_once() -> None:
    """What is imported in a function may be optional."""
    found = []
    for name, files in packages().items():
        folder = (
            ROOT if name == "accel_core" else next(it for it in files[0].parents if it.name == "src").parent
        )
        allowed = required(folder)
        found += [
            f"{place(file, line)}: {library}"
            for file in files
            for line, library in imported_at_once(tree(file))
            if library not in allowed
        ]
    refuse(found, "a library that the package's pyproject.toml does not require: add it, or import it late")


def test_an_import_in_a_function_or_under_a_guard_is_not_one_at_once() -> None:
    source = "import sys, yaml\nfrom attrs import field\nif X:\n    import a\ndef f():\n    import b\n"

    assert list(imported_at_once(ast.parse(source))) == [(1, "pyyaml"), (2, "attrs")]


def imports_within(named: dict[str, ast.Module]) -> dict[str, dict[str, int]]:
    """Module -> the modules of these that it imports, and in which line: for types and in functions too."""
    return {
        name: {
            target: getattr(node, "lineno", 0)
            for node in ast.walk(module)
            for target in targets(node, named.keys())
            if target != name
        }
        for name, module in named.items()
    }


def targets(node: ast.AST, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            target = whole if whole in known else node.module
            yield from [target] if target in known else []


def circle(imports: dict[str, dict[str, int]]) -> list[tuple[str, int, str]]:
    """(module, line, module that it imports) for each import of a circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return [(name, imports[name][target], target) for target, name in pairwise(error.args[1])]
    return []


def module_name(file: Path, package: str) -> str:
    parts = [*file.with_suffix("").parts]
    inner = parts[len(parts) - 1 - parts[::-1].index(package) :]
    return ".".join(inner[:-1] if inner[-1] == "__init__" else inner)


def test_no_module_imports_itself_by_way_of_others() -> None:
    found = []
    for package, files in packages().items():
        named = {module_name(file, package): file for file in files}
        imports = circle(imports_within({name: tree(file) for name, file in named.items()}))
        found += [f"{place(named[name], line)}: imports {target}" for name, line, target in imports]
    refuse(found, "an import of a circle: move what two modules need into a lower one")


def test_a_circle_by_an_import_for_types_is_seen() -> None:
    above = ast.parse("from house.below import floor\n")
    below = ast.parse("if TYPE_CHECKING:\n    from house.above import roof\n")
    house = {"house": ast.parse(""), "house.above": above, "house.below": below}

    assert sorted(circle(imports_within(house))) == [
        ("house.above", 1, "house.below"),
        ("house.below", 2, "house.above"),
    ]


def test_programs_of_this_repository_import_names_of_core_that_exist() -> None:
    folders = [ROOT / name for name in ("benchmarks", "examples", "tools")]
    imports = [
        (file, node)
        for folder in folders
        for file in sorted(folder.rglob("*.py"))
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "accel_core"
    ]
    refuse(
        (
            f"{place(file, node.lineno)}: {node.module} has no {alias.name}"
            for file, node in imports
            for alias in node.names
            if not hasattr(import_module(node.module or ""), alias.name)
            and find_spec(f"{node.module}.{alias.name}") is None
        ),
        "a program imports a name of core that is gone",
    )
