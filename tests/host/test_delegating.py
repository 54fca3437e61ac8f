"""A method that only delegates to `self.below` is as if it were not there; one that does more is called."""

from __future__ import annotations

import pytest
import toy_specs as hooks
import toy_stacks
from toy_stacks import stack

from accel_core.contract.bound import concatenate, no_op
from accel_core.contract.hooks import implements
from accel_core.contract.spec import spec
from accel_core.errors import PluginError
from accel_core.plugins.manager import LAYERS, PluginManager


class Base:
    @no_op
    @implements(hooks.backward)
    def backward(self, unit, loss, boundary):
        return "base"

    @implements(hooks.reasons)
    def reasons(self, unit):
        return ["base"]

    @implements(hooks.refine)
    def refine(self, unit, model, phase):
        return f"base({model})"


class Delegates(Base):
    """Every hook of the base; each also as a subclass may override it."""

    def backward(self, unit, loss, boundary):
        """Leave it to the layers below."""
        return self.below.backward(unit, loss, boundary)

    def reasons(self, unit):
        return self.below.reasons(unit)

    def refine(self, unit, model, phase):
        return self.below.refine(unit, model, phase)


class Around(Base):
    def backward(self, unit, loss, boundary):
        answer = self.below.backward(unit, 2 * loss, boundary)
        return f"around {answer}"

    def reasons(self, unit):
        return [*self.below.reasons(unit)]

    def refine(self, unit, model, phase):
        return str(self.below.refine(unit, model, phase))


class Answers(Delegates):
    """A subclass that implements again."""

    def reasons(self, unit):
        return ["above"]


def over_the_base(plugin):
    hooks = stack(base=Base(), strategy=plugin)
    plugin.below = hooks.below_layer(LAYERS["strategy"])
    return hooks


def test_a_step_that_is_only_delegated_is_left_out():
    assert over_the_base(Delegates()).step("backward") is None
    assert over_the_base(Around()).step("backward") is not None


@pytest.mark.parametrize("plugin", [Delegates(), Around()])
def test_answers_of_the_layers_below_count_once(plugin):
    called = over_the_base(plugin)
    assert called.reasons("u") == ["base"]
    assert called.refine("u", "m", "convert") == "base(m)"


def test_a_method_that_does_more_is_called_around_the_layer_below():
    assert over_the_base(Around()).backward("u", 1.0, True) == "around base"


def test_a_subclass_of_a_plugin_that_delegates_may_implement_again():
    assert over_the_base(Answers()).reasons("u") == ["base", "above"]


def test_what_else_a_method_calls_is_no_delegation():
    class Narrows(Base):
        def reasons(self, unit):
            return self.below.reasons(unit) or ["narrowed"]

    assert over_the_base(Narrows()).reasons("u") == ["base", "narrowed"]


# -- declarations of a package ---------------------------------------------------------------------


def declare(*arguments):
    def gauge(unit): ...

    return spec(*arguments)(gauge)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("evryone",), r"spec of hook gauge: 'evryone' is not a kind of hook; did you mean 'everyone'\?\n"),
        (("everyone", "concatenate"), r"gauge: combine must be a function, got 'concatenate'\nimport merge,"),
        (("owner", concatenate), r"gauge: combine is for hooks of everyone and observers, .* kind 'owner'\n"),
    ],
)
def test_a_declaration_that_cannot_be_called_is_refused_at_once(arguments, problem):
    with pytest.raises(PluginError, match=problem):
        declare(*arguments)


def test_a_module_without_declarations_names_the_plugin():
    with pytest.raises(PluginError, match=r"plugin 'gauge': module toy_stacks, .* declares no hook\nmark"):
        PluginManager().add_package_specs("gauge", toy_stacks)
