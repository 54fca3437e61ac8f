"""The contract is one that pluggy accepts too, and its steps are bound once.

tests/repository/test_hooks.py checks how each hook is declared.
"""

from __future__ import annotations

import inspect
import re

import pluggy
import pytest

from accel_core import API_VERSION
from accel_core.contract import hooks as hookspecs
from accel_core.plugins.binding import Binder, Steps, no_op

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


def test_the_specs_are_a_contract_that_pluggy_accepts_too():
    manager = pluggy.PluginManager("accel_core")
    manager.add_hookspecs(hookspecs)
    manager.register(plugin_with_every_hook())
    manager.check_pending()
    specs = [name for name, value in vars(hookspecs).items() if hasattr(value, "accel_spec")]
    assert all(len(getattr(manager.hook, name).get_hookimpls()) == 1 for name in specs)


def test_the_steps_of_a_unit_are_the_per_step_hooks():
    binder = Binder()
    hooks = binder.hooks([binder.register(plugin_with_every_hook(), name="all", slot="base")])
    steps = Steps(hooks)

    assert set(Steps.__slots__) == STEPS
    assert all(getattr(steps, hook) == getattr(hooks, hook) for hook in STEPS)


def test_steps_that_do_nothing_are_none():
    class Base:
        @hookspecs.implements(hookspecs.reduce_gradients)
        @no_op
        def reduce_gradients(self, unit): ...

    binder = Binder()
    steps = Steps(binder.hooks([binder.register(Base(), name="base", slot="base")]))

    assert steps.reduce_gradients is None
    assert steps.mark_step is None


def test_a_step_that_does_not_exist_is_an_attribute_error():
    binder = Binder()
    with pytest.raises(AttributeError):
        _ = Steps(binder.hooks([])).backwards
