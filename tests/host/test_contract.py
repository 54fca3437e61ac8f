"""Every hook of the real contract keeps the contract's own rules."""

from __future__ import annotations

import inspect
import re

import pluggy
import pytest

from accel_core import API_VERSION
from accel_core.contract import hooks as hookspecs
from accel_core.plugins.binding import Binder, Hooks, Steps, no_op
from accel_core.plugins.combining import ANSWERS

SPECS = {name: value for name, value in vars(hookspecs).items() if hasattr(value, "accel_spec")}
STEPS = {name for name, function in SPECS.items() if function.accel_spec.per_step}

every_hook = pytest.mark.parametrize("hook", SPECS)


@every_hook
def test_it_says_what_it_is(hook):
    text = inspect.getdoc(SPECS[hook])

    assert text
    assert text.splitlines()[0].endswith((".", ",", ":", ";")) or "." in text


@every_hook
def test_its_parameters_are_plain(hook):
    for parameter in inspect.signature(SPECS[hook]).parameters.values():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert parameter.default is parameter.empty


@every_hook
def test_it_is_fully_typed(hook):
    annotations = dict(SPECS[hook].__annotations__)

    assert annotations.pop("return")
    assert list(annotations) == list(inspect.signature(SPECS[hook]).parameters)


@every_hook
def test_it_has_a_kind_that_says_how_answers_combine(hook):
    spec = SPECS[hook].accel_spec
    answer = SPECS[hook].__annotations__["return"].partition("[")[0]
    if spec.kind == "wrapper":
        assert spec.refines in inspect.signature(SPECS[hook]).parameters
    elif spec.kind == "everyone":
        assert answer in ANSWERS
    else:
        assert spec.kind == "owner"


@every_hook
def test_it_does_not_hide_behind_a_method_of_hooks(hook):
    assert not hasattr(Hooks, hook)


@pytest.mark.parametrize("hook", sorted(STEPS - {"mark_step"}))
def test_per_step_it_is_given_its_unit_first(hook):
    assert next(iter(inspect.signature(SPECS[hook]).parameters)) == "unit"


def test_the_module_lists_each_hook_once():
    source = inspect.getsource(hookspecs)

    assert all(len(re.findall(rf"^def {hook}\(", source, re.MULTILINE)) == 1 for hook in SPECS)


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
        def reduce_gradients(self, unit, num_items): ...

    binder = Binder()
    steps = Steps(binder.hooks([binder.register(Base(), name="base", slot="base")]))

    assert steps.reduce_gradients is None
    assert steps.mark_step is None


def test_a_step_that_does_not_exist_is_an_attribute_error():
    binder = Binder()
    with pytest.raises(AttributeError):
        _ = Steps(binder.hooks([])).backwards
