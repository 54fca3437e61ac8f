"""The SageMaker SDK's source, read and not imported: it needs some fifty packages, and an account.

ACCEL_TEST_VENDOR names a folder with the wheels of sagemaker-train and sagemaker-core.
"""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

NEEDED = pytest.mark.skipif(
    "ACCEL_TEST_VENDOR" not in os.environ, reason="the SageMaker SDK is not at hand (ACCEL_TEST_VENDOR)"
)


def file_of(module: str) -> Path:
    return Path(os.environ["ACCEL_TEST_VENDOR"], *module.split(".")).with_suffix(".py")


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


def class_of(module: str, name: str) -> ast.ClassDef:
    (found,) = (each for each in tree_of(module).body if isinstance(each, ast.ClassDef) and each.name == name)
    return found


def fields_of(module: str, name: str) -> set[str]:
    """Return the public fields of a pydantic class, which are its arguments."""
    made = class_of(module, name)
    names = {each.target.id for each in made.body if isinstance(each, ast.AnnAssign)}
    for base in made.bases:
        if isinstance(base, ast.Attribute):  # shapes.ResourceConfig
            names |= fields_of("sagemaker.core.shapes.shapes", base.attr)
    return {each for each in names if not each.startswith("_")}


def arguments_of(module: str, name: str) -> set[str]:
    """Return the arguments of a function, or of a method `Class.method`."""
    holder, _, function = name.rpartition(".")
    body = class_of(module, holder).body if holder else tree_of(module).body
    (found,) = (each for each in body if isinstance(each, ast.FunctionDef) and each.name == function)
    return {each.arg for each in (*found.args.args, *found.args.kwonlyargs)} - {"self"}


def strict(allowed: set[str], made: list[dict[str, Any]], **members: Any) -> type:
    """Return a class that takes these arguments, and notes those that it is given."""

    def __init__(self: Any, **given: Any) -> None:
        assert given.keys() <= allowed, given.keys() - allowed
        vars(self).update(given)
        made.append(given)

    return type("Strict", (), {"__init__": __init__, **members})
