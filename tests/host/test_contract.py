"""The contract is one of pluggy, and its steps are bound once.

tests/repository/test_hooks.py checks how each hook is declared.
"""

from __future__ import annotations

import inspect
import re

import pytest

from accel_core import API_VERSION
from accel_core.contract import hooks as hookspecs
from accel_core.contract.bound import Steps, no_op
from accel_core.plugins.manager import PluginManager

SPECS = {name: value for name, value in vars(hookspecs).items() if hasattr(value, "accel_spec")}
STEPS = {name for name, function in SPECS.items() if function.accel_spec.per_step}


def test_the_version_is_major_minor():
    assert re.fullmatch(r"\d+\.\d+", API_VERSION)


def plugin_with_every_hook():
    methods = {
        name: hookspecs.implements(function)(
            eval(
                f"lambda self, {', '.join(inspect.signature(function).parameters)}: None".replace(", :", ":")
            )
        )
        for name, function in SPECS.items()
    }
    return type("Everything", (), methods)()


def hooks_of_base(plugin):
    manager = PluginManager()
    manager.add_plugin(plugin, name="base", slot="base")
    return manager.hooks_of(["base"])


def test_the_steps_of_a_unit_are_the_per_step_hooks():
    hooks = hooks_of_base(plugin_with_every_hook())
    steps = Steps(hooks)

    assert vars(steps).keys() == STEPS
    assert all(getattr(steps, hook) == getattr(hooks, hook) for hook in STEPS)


def test_steps_that_do_nothing_are_none():
    class Base:
        @hookspecs.implements(hookspecs.reduce_gradients)
        @no_op
        def reduce_gradients(self, unit): ...

    steps = Steps(hooks_of_base(Base()))

    assert steps.reduce_gradients is None
    assert steps.mark_step is None


def test_a_step_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError):
        _ = Steps(hooks_of_base(plugin_with_every_hook())).backwards
