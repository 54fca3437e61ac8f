"""Names, arguments and defaults of Accelerate 1.13 and 1.14, beside those of 1.15, which are served.

ACCEL_TEST_VENDOR names a folder with a wheel of each of these releases.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

import pytest

from accel_compat.unsupported import inventory

FOLDER = Path(os.environ.get("ACCEL_TEST_VENDOR", "."))
RELEASES = ("1.13.0", "1.14.0", "1.15.0")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not list(FOLDER.glob("accelerate-1.1*.whl")), reason="no wheels are at hand (ACCEL_TEST_VENDOR)"
    ),
]
SERVED_YET = "accelerate.utils.imports.is_ipex_available"
DEFAULTS = {
    "accelerate.accelerator.Accelerator.init_trackers.init_kwargs": "1.13.0",
    "accelerate.accelerator.Accelerator.log.log_kwargs": "1.13.0",
    "accelerate.tracking.AimTracker.log.step": "1.13.0",
    "accelerate.tracking.GeneralTracker.log.step": "1.13.0",
    "accelerate.tracking.MLflowTracker.log.step": "1.13.0",
    "accelerate.tracking.TensorBoardTracker.log_images.step": "1.13.0",
    "accelerate.utils.ao.convert_model_to_fp8_ao.module_filter_func": "1.14.0",
}
"""Argument with another default, or none, before 1.15 -> the last such release."""

Names = Mapping[str, Mapping[str, str]]
"""Function, class or method -> its arguments -> their defaults as text."""


def names_of_release(version: str) -> Names:
    with ZipFile(FOLDER / f"accelerate-{version}-py3-none-any.whl") as wheel:
        files = [
            name
            for name in wheel.namelist()
            if name.startswith("accelerate/") and name.endswith(".py") and "/test_utils/" not in name
        ]
        return {
            f"{file[:-3].replace('/', '.').removesuffix('.__init__')}.{name}": arguments
            for file in files
            for name, arguments in _defined(ast.parse(wheel.read(file)))
        }


def _defined(tree: ast.Module | ast.ClassDef, before: str = "") -> Iterator[tuple[str, Mapping[str, str]]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__init__"):
            yield before + node.name, _arguments(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield before + node.name, {}
            yield from _defined(node, f"{before}{node.name}.")


def _arguments(node: ast.FunctionDef) -> Mapping[str, str]:
    given = [*node.args.posonlyargs, *node.args.args]
    defaults: list[ast.expr | None] = [*[None] * (len(given) - len(node.args.defaults)), *node.args.defaults]
    pairs = zip([*given, *node.args.kwonlyargs], [*defaults, *node.args.kw_defaults], strict=True)
    return {each.arg: "" if default is None else ast.unparse(default) for each, default in pairs}


@pytest.mark.parametrize("version", RELEASES[:-1])
def test_a_release_differs_from_the_served_one_by_what_is_listed(version):
    before, now = names_of_release(version), names_of_release(RELEASES[-1])
    shared = [(name, argument) for name in before if name in now for argument in before[name]]
    changed = {
        f"{name}.{argument}"
        for name, argument in shared
        if argument in now[name] and now[name][argument] != before[name][argument]
    }
    defaults = {name for name, last in DEFAULTS.items() if RELEASES.index(version) <= RELEASES.index(last)}

    assert [name for name in before if name not in now] == []
    assert [(name, argument) for name, argument in shared if argument not in now[name]] == []
    assert changed == defaults


def test_a_name_that_left_is_served_yet():
    module, _, name = SERVED_YET.rpartition(".")

    assert callable(getattr(import_module(module), name))
    assert name not in inventory()[module]
