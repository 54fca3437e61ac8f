"""What a plugin's methods may look like, and what is said to those that do not."""

from __future__ import annotations

import functools

import pluggy
import pytest
import toy_specs as hooks

from accel_core.contract.hooks import implements
from accel_core.errors import PluginError
from accel_core.plugins.manager import PluginManager

mark = pluggy.HookimplMarker("accel_core")


def register(cls, slot="strategy"):
    manager = PluginManager(hooks)
    manager.add_plugin(cls(), name="pony", slot=slot, origin="accel-pony 0.3")
    return manager.hooks_of(["pony"])


def refusal(cls, slot="strategy"):
    with pytest.raises(PluginError) as caught:
        register(cls, slot)
    assert (caught.value.plugin, caught.value.distribution) == ("pony", "accel-pony 0.3")
    head, _, problem = str(caught.value).partition(": ")
    assert head == f"{slot} plugin 'pony' (accel-pony 0.3)"
    return problem


def test_a_mark_names_a_hook():
    with pytest.raises(PluginError, match=r"backward is not a hook\nwrite @implements\(hooks\.NAME\)"):

        class Bare:
            @implements
            def backward(self, unit, loss): ...


def test_a_name_in_a_mark_is_of_a_package():
    with pytest.raises(PluginError, match=r"'backwardd' is not a hook\n.*@implements\(\"PACKAGE\.NAME\"\)"):
        implements("backwardd")


def test_the_mark_may_stand_below_and_above_staticmethod_and_classmethod():
    class Below:
        @staticmethod
        @implements(hooks.backward)
        def backward(unit, loss):
            return unit, loss

        @classmethod
        @implements(hooks.decide)
        def decide(cls, unit):
            return cls, unit

    class Above:
        @implements(hooks.backward)
        @staticmethod
        def backward(unit, loss):
            return unit, loss

        @implements(hooks.decide)
        @classmethod
        def decide(cls, unit):
            return cls, unit

    for cls in (Below, Above):
        assert register(cls).backward("u", 2.0, True) == ("u", 2.0)
        assert register(cls).decide("u", {}) == (cls, "u")


# -- parameters ------------------------------------------------------------------------------------


def test_parameters_may_be_left_out():
    class Old:
        @implements(hooks.backward)
        def backward(self, unit, loss):
            return unit, loss

    assert register(Old).backward("u", 2.0, True) == ("u", 2.0)


def test_all_parameters_may_be_left_out():
    class Old:
        @implements(hooks.backward)
        def backward(self):
            return "called"

    assert register(Old).backward("u", 2.0, True) == "called"


def test_parameters_may_stand_in_another_order():
    class Turned:
        @implements(hooks.backward)
        def backward(self, boundary, unit):
            return unit, boundary

    assert register(Turned).backward("u", 2.0, True) == ("u", True)
    assert register(Turned).backward(loss=2.0, unit="u", boundary=False) == ("u", False)


def test_all_parameters_may_stand_in_another_order():
    class Turned:
        @implements(hooks.backward)
        def backward(self, boundary, loss, unit):
            return unit, loss, boundary

    assert register(Turned).backward("u", 2.0, True) == ("u", 2.0, True)


def test_an_adapted_method_can_be_found_again():
    class Old:
        @implements(hooks.backward)
        def backward(self, unit): ...

    assert register(Old).backward.__wrapped__.__func__ is Old.backward


def test_a_method_with_the_specs_parameters_is_called_itself():
    class New:
        @implements(hooks.backward)
        def backward(self, unit, loss, boundary): ...

    assert register(New).backward.__func__ is New.backward


def test_decorated_methods_are_looked_through():
    def decorate(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            return ["decorated", function(*args, **kwargs)]

        return call

    class Decorated:
        @implements(hooks.backward)
        @decorate
        def backward(self, unit, loss):
            return loss

    assert register(Decorated).backward("u", 2.0, True) == ["decorated", 2.0]


def test_an_unknown_parameter_is_named_with_the_definition_found():
    class Misspelt:
        @implements(hooks.backward)
        def backward(self, unit, los): ...

    problem = refusal(Misspelt)
    assert "hookimpl definition: backward(unit, los)" in problem
    assert "{'los'} are declared in the hookimpl but can not be found in the hookspec" in problem


# -- hooks -----------------------------------------------------------------------------------------


def test_an_unknown_hook_is_named():
    class Misspelt:
        @mark
        def backwards(self, unit): ...

    assert refusal(Misspelt).startswith("unknown hook 'backwards'")


def test_a_method_without_a_mark_is_no_hook_and_is_told_once(caplog):
    class Helper:
        def backward(self, anything, *goes): ...

    assert register(Helper).implementations("backward") == []
    (said,) = caplog.messages
    assert "method backward has the name of a hook, but no mark, and nothing calls it" in said


def test_a_method_may_have_a_name_of_its_own():
    class Named:
        @implements(hooks.backward)
        def _my_backward(self, unit, loss, boundary):
            return loss

    assert register(Named).backward("u", 2.0, True) == 2.0


class Parent:
    @implements(hooks.backward)
    def backward(self, unit):
        return "parent"


def test_hooks_are_inherited():
    class Child(Parent):
        pass

    assert register(Child).backward("u", 2.0, True) == "parent"


def test_an_override_implements_the_hook_without_a_mark():
    class Child(Parent):
        def backward(self, unit, loss):
            return f"child {loss}"

    class Grandchild(Child):
        def backward(self, unit):
            return f"grandchild of {super().backward(unit, 1)}"

    assert register(Child).backward("u", 2.0, True) == "child 2.0"
    assert register(Grandchild).backward("u", 2.0, True) == "grandchild of child 1"
    assert register(Parent).backward("u", 2.0, True) == "parent"


def test_an_inherited_hook_is_given_up_with_none():
    class Child(Parent):
        backward = None

    assert register(Child).implementations("backward") == []


def test_properties_are_not_evaluated():
    class Lazy(Parent):
        @property
        def device(self):
            raise RuntimeError("no device yet")

    assert register(Lazy).backward("u", 2.0, True) == "parent"


def test_two_plugins_of_one_name_are_refused():
    manager = PluginManager(hooks)
    manager.add_plugin(Parent(), name="pony", slot="strategy")

    with pytest.raises(PluginError, match="device plugin 'pony' .*: Plugin name already registered: pony"):
        manager.add_plugin(Parent(), name="pony", slot="device", origin="accel-pony 0.3")


# -- slots -----------------------------------------------------------------------------------------


class Logs:
    @implements(hooks.log)
    def log(self, values):
        values["seen"] = True


def test_trackers_observe():
    seen = {}
    register(Logs, "tracker").log(seen)

    assert seen == {"seen": True}


class Refines:
    @implements(hooks.refine)
    def refine(self, unit, model, phase): ...


class Told:
    @implements(hooks.told)
    def told(self, unit, applied): ...


@pytest.mark.parametrize("cls", [Parent, Told, Refines])
def test_trackers_do_nothing_else(cls):
    assert "a tracker implements observers only" in refusal(cls, "tracker")


def test_extensions_own_nothing():
    assert "an extension no owner hook" in refusal(Parent, "extension")


@pytest.mark.parametrize("cls", [Told, Refines, Logs])
def test_extensions_refine_and_join_in(cls):
    found = register(cls, "extension")
    assert any(found.implementations(name) for name in vars(cls))
