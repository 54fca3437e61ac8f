"""No package replaces a private part of torch's or a vendor's live objects, but for a list with reasons."""

from __future__ import annotations

import ast

import pytest
from checkout import packages, refuse
from replaced_names import EXCEPTIONS, own_attributes, replaced, replaced_in


def test_packages_replace_only_the_names_of_the_list() -> None:
    refuse(
        (
            f"{where}: {name}"
            for package in packages()
            for name, where in replaced(package).items()
            if name not in EXCEPTIONS.get(package, {})
        ),
        "a private name, class or function of torch or a vendor is replaced: use a public way, or refuse the"
        " program that needs it at prepare; an exception and its reason stand in replaced_names.EXCEPTIONS",
    )


def test_the_list_has_no_name_that_is_not_replaced() -> None:
    refuse(
        (
            f"{package}: {name}"
            for package, names in EXCEPTIONS.items()
            for name in names.keys() - replaced(package).keys()
        ),
        "an exception that nothing needs: remove it from replaced_names.EXCEPTIONS",
    )


@pytest.mark.parametrize(
    ("offence", "name"),
    [
        ("module._handle = None", "_handle"),
        ("engine.optimizer._steps += 1", "_steps"),
        ("del module._forward_hooks", "_forward_hooks"),
        ("a, state._group = 1, 2", "_group"),
        ("setattr(module, '_apply', convert)", "_apply"),
        ("vars(module)['_apply'] = convert", "_apply"),
        ("module.__dict__['_apply'] = convert", "_apply"),
        ("module.__dict__.update(_apply=convert)", "_apply"),
        ("tensor.__class__ = Other", "__class__"),
        ("self.__class__ = Other", "__class__"),
        ("function.__code__ = other", "__code__"),
        ("import torch\ntorch.nn.functional.linear = mine", "linear"),
        ("from torch.nn import functional as F\nF.linear = mine", "linear"),
        ("from deepspeed import Engine\nsetattr(Engine, 'step', mine)", "step"),
    ],
)
def test_a_planted_offence_is_found(offence: str, name: str) -> None:
    assert [found for found, _ in replaced_in(ast.parse(offence))] == [name]


@pytest.mark.parametrize(
    "fine",
    [
        "self._state = 1",
        "parameter.grad = None",
        "module.weight = weight",
        "other._state = self._state",
        "vars(self)['_state'] = 1",
        "import sys\nsys.argv = []",
        "from accel_core import Unit\nUnit.thing = 1",
        "x = module._handle",
    ],
)
def test_what_is_ours_or_public_is_not(fine: str) -> None:
    assert list(replaced_in(ast.parse(fine), frozenset({"_state"}))) == []


def test_attributes_that_our_classes_have_are_known() -> None:
    assert {"_mesh", "_replica_groups"} <= own_attributes()
