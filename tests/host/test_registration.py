"""What a plugin's methods may look like, and what is said to those that do not."""

from __future__ import annotations

import functools

import pluggy
import pytest
import toy_specs as hooks

from accel_core.contract.hooks import implements
from accel_core.errors import PluginError
from accel_core.plugins.binding import Binder

mark = pluggy.HookimplMarker("accel_core")


def register(cls, slot="strategy"):
    binder = Binder(hooks)
    return binder.hooks([binder.register(cls(), name="pony", slot=slot, origin="accel-pony 0.3")])


def refusal(cls, slot="strategy"):
    with pytest.raises(PluginError) as caught:
        register(cls, slot)
    assert (caught.value.plugin, caught.value.distribution) == ("pony", "accel-pony 0.3")
    head, _, problem = str(caught.value).partition(f", hook {caught.value.hook}: ")
    assert head == f"{slot} plugin 'pony' (accel-pony 0.3)"
    return problem


def test_a_method_with_the_name_and_parameters_of_a_hook_wants_the_mark():
    class Forgetful:
        def backward(self, unit, loss):
            raise AssertionError

    assert refusal(Forgetful) == "the method backward is not marked; write @implements(hooks.backward)"


def hides(function):
    def called(*arguments, **keywords):
        return function(*arguments, **keywords)

    return called


def test_a_decorator_that_hides_the_mark_is_found():
    class Decorated:
        @hides
        @implements(hooks.backward)
        def backward(self, unit, loss): ...

    assert refusal(Decorated) == "the method backward is not marked; write @implements(hooks.backward)"


class Holds:
    def __init__(self, function):
        self.function = function


@pytest.mark.parametrize("hide", [property, functools.cached_property, functools.partialmethod, Holds])
def test_an_object_that_hides_the_mark_is_refused(hide):
    class Hidden:
        @hide
        @implements(hooks.backward)
        def other(self, unit, loss): ...

    about = f"other is a {hide.__name__}, which hides the mark of its function"
    assert refusal(Hidden) == f"{about}; make it a method, with @implements(hooks.backward) on top"


def test_a_mark_names_a_hook():
    with pytest.raises(PluginError, match=r"backward is not a hook\nwrite @implements\(hooks\.NAME\)"):

        class Bare:
            @implements
            def backward(self, unit, loss): ...


def test_a_method_of_the_class_wants_the_mark_too():
    class Forgetful:
        @classmethod
        def backward(cls, unit): ...

    assert refusal(Forgetful) == "the method backward is not marked; write @implements(hooks.backward)"


def test_a_method_that_only_shares_a_hooks_name_is_the_plugins_own():
    class Own:
        def backward(self, tape):
            return tape

    assert register(Own).implementations("backward") == []


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


def test_a_hook_of_the_instance_is_refused():
    class Late:
        def __init__(self):
            self.back = implements(hooks.backward)(lambda unit: unit)

    assert refusal(Late) == (
        "back is a function of the instance, which is never called; make it a method of the class"
    )


def test_a_hook_whose_body_would_not_run_is_refused():
    class Yields:
        @implements(hooks.backward)
        def backward(self, unit, loss):
            yield

    assert refusal(Yields) == (
        "a function with `yield` does nothing when it is called;"
        " write it without, or put @contextmanager below the mark"
    )


def test_a_hook_that_nobody_would_await_is_refused():
    class Awaited:
        @implements(hooks.backward)
        async def backward(self, unit, loss): ...

    class Generator:
        @implements(hooks.rows)
        async def rows(self, unit):
            yield unit

    for cls in (Awaited, Generator):
        assert (
            refusal(cls) == "an `async def` does nothing when it is called, as nobody awaits it; write `def`"
        )


def test_a_sequence_may_be_yielded():
    class Yields:
        @implements(hooks.rows)
        def rows(self, unit):
            yield unit

    assert list(register(Yields).rows("u")) == ["u"]


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


def test_an_unknown_parameter_is_answered_with_the_nearest():
    class Misspelt:
        @implements(hooks.backward)
        def backward(self, unit, los): ...

    assert refusal(Misspelt) == "the spec has no parameter 'los'; did you mean 'loss'?"


def starred(self, unit, *loss): ...
def doubly_starred(self, unit, **loss): ...
def keyword_only(self, unit, *, loss): ...
def positional_only(self, unit, /): ...
def defaulted(self, unit, loss=None): ...


@pytest.mark.parametrize("method", [starred, doubly_starred, keyword_only, positional_only, defaulted])
def test_parameters_are_plain(method):
    class Odd:
        backward = implements(hooks.backward)(method)

    try:
        assert "is not plain" in refusal(Odd)
    finally:
        del method.accel_core_impl


# -- hooks -----------------------------------------------------------------------------------------


def test_an_unknown_hook_is_answered_with_the_nearest():
    class Misspelt:
        @mark
        def backwards(self, unit): ...

    assert refusal(Misspelt) == "there is no such hook; did you mean 'backward'?"


@pytest.mark.parametrize("order", ["tryfirst", "trylast", "wrapper", "hookwrapper"])
def test_marks_that_would_change_the_order_are_refused(order):
    def backward(self, unit):
        yield

    class Pushy:
        pass

    Pushy.backward = mark(**{order: True})(backward)
    assert refusal(Pushy) == f"the mark {order} is refused: layers decide the order, `self.below` goes on"


def test_a_method_without_a_mark_is_no_hook():
    class Helper:
        def backward(self, anything, *goes): ...

    assert register(Helper).implementations("backward") == []


def test_a_method_may_have_a_name_of_its_own():
    class Named:
        @implements(hooks.backward)
        def _my_backward(self, unit, loss, boundary):
            return loss

    assert register(Named).backward("u", 2.0, True) == 2.0


def test_a_hook_implemented_twice_is_refused():
    class Twice:
        @implements(hooks.backward)
        def backward(self, unit): ...

        @implements(hooks.backward)
        def other(self, unit): ...

    assert refusal(Twice) == "a second method implements it: other"


class Parent:
    @implements(hooks.backward)
    def backward(self, unit):
        return "parent"


def test_an_unmarked_method_of_almost_a_hooks_name_and_its_parameters_is_refused():
    class Misspelt:
        def backwards(self, unit, loss, boundary):
            raise AssertionError

    assert refusal(Misspelt).startswith(
        "the method backwards is never called; write @implements(hooks.backward)"
    )


def test_an_unmarked_method_with_parameters_of_its_own_is_left_alone():
    class Helpful:
        def backwards(self, tensor):
            return tensor

    assert register(Helpful).implementations("backward") == []


def test_hooks_are_inherited():
    class Child(Parent):
        pass

    assert register(Child).backward("u", 2.0, True) == "parent"


def test_overriding_a_hook_needs_the_mark_again():
    class Child(Parent):
        def backward(self, unit): ...

    assert refusal(Child) == "Child.backward overrides it unmarked; write @implements(hooks.backward)"


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


def test_instances_that_compare_equal_are_two_plugins():
    class Equal(Parent):
        def __eq__(self, other):
            return True

        __hash__ = None

    binder = Binder(hooks)
    rows = [binder.register(Equal(), name=name, slot="strategy") for name in ("student", "teacher")]
    assert [found.plugin for found in binder.hooks(rows).implementations("backward")] == [
        "student",
        "teacher",
    ]


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
    assert refusal(cls, "tracker") == "a tracker implements observers only"


def test_extensions_own_nothing():
    assert refusal(Parent, "extension").startswith("an extension implements no owner hook")


@pytest.mark.parametrize("cls", [Told, Refines, Logs])
def test_extensions_refine_and_join_in(cls):
    found = register(cls, "extension")
    assert any(found.implementations(name) for name in vars(cls))
