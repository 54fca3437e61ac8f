"""Modules lie in rooms and import one way only: no circles, imports for types and in functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [ROOT / "accel_core", *sorted(ROOT.glob("*/*/src/accel_*"))]


def name_of(file: Path, folder: Path) -> str:
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def targets(node: ast.AST, modules: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield whole if whole in modules else node.module


def graph(folder: Path, package: str) -> dict[str, set[str]]:
    files = {name_of(file, folder): file for file in (folder / package).rglob("*.py")}
    modules = set(files)
    return {
        name: {
            target
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            for target in targets(node, modules)
            if target in modules and target != name
        }
        for name, file in files.items()
    }


def circle(imports: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", [p for p in PACKAGES if p.is_dir()], ids=lambda path: path.name)
def test_no_module_imports_itself_by_way_of_others(package: Path) -> None:
    assert circle(graph(package.parent, package.name)) == []


def test_a_circle_by_an_import_for_types_would_be_seen(tmp_path: Path) -> None:
    house = tmp_path / "house"
    house.mkdir()
    (house / "__init__.py").touch()
    (house / "above.py").write_text("from house.below import floor\n")
    (house / "below.py").write_text("if TYPE_CHECKING:\n    from house.above import roof\n")

    assert sorted(set(circle(graph(tmp_path, "house")))) == ["house.above", "house.below"]


def test_the_root_of_core_has_four_modules() -> None:
    found = sorted(file.name for file in (ROOT / "accel_core").glob("*.py"))

    assert found == ["__init__.py", "__main__.py", "_version.py", "errors.py"]
