"""Who answers a hook: owners, everyone, wrappers; layers and what lies below."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import toy_specs as hooks
from toy_stacks import stack

from accel_core.contract.bound import no_op
from accel_core.contract.hooks import implements
from accel_core.errors import PluginError
from accel_core.plugins.manager import LAYERS, PluginManager

# -- owner -----------------------------------------------------------------------------------------


class Decides:
    def __init__(self, answer):
        self.answer, self.calls = answer, 0

    @implements(hooks.decide)
    def decide(self, unit, options):
        self.calls += 1
        return self.answer


def test_an_owner_is_the_topmost_layer_and_nobody_else_is_called():
    base, device, strategy = Decides("base"), Decides("device"), Decides("strategy")

    assert stack(base=base, device=device, strategy=strategy).decide("u", {}) == "strategy"
    assert (base.calls, device.calls, strategy.calls) == (0, 0, 1)


def test_an_owner_that_answers_none_has_answered():
    base, device = Decides("base"), Decides(None)

    assert stack(base=base, device=device).decide("u", {}) is None
    assert base.calls == 0


def test_an_owner_is_called_directly():
    device = Decides("device")

    assert stack(base=Decides("base"), device=device).decide == device.decide


def test_layers_decide_and_not_the_order_of_registration():
    order = {slot: Decides(slot) for slot in ("strategy", "precision", "device", "base")}

    assert stack(**order).decide("u", {}) == "strategy"
    order.pop("strategy")
    assert stack(**order).decide("u", {}) == "precision"
    order.pop("precision")
    assert stack(**order).decide("u", {}) == "device"


def test_the_layers_are_those_of_the_contract():
    assert sorted(LAYERS, key=lambda slot: LAYERS[slot])[:3] == ["base", "device", "precision"]
    assert LAYERS["precision"] < LAYERS["strategy"] < LAYERS["extension"] < LAYERS["tracker"]


def test_an_owner_that_nobody_is_says_which_stack():
    with pytest.raises(
        PluginError, match=r"^hook backward: no plugin of device \+ strategy implements it\nadd"
    ):
        stack(strategy=Decides(1), device=Decides(2)).backward("u", 1.0, True)


def test_hooks_can_be_looked_at_by_tools_that_ask_for_private_names():
    assert not hasattr(stack(base=Decides(1)), "_repr_html_")
    assert copy.copy(stack(base=Decides(1))).decide("u", {}) == 1


def test_a_hook_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match=r"there is no hook 'decides'; did you mean 'decide'\?"):
        _ = stack(base=Decides(1)).decides


class Refines(Decides):
    below = None

    @implements(hooks.decide)
    def decide(self, unit, options):
        return f"{self.answer}({self.below.decide(unit, options)})"


def test_below_is_the_same_hook_for_the_layers_under_a_plugin():
    plugins = {"base": Decides("base"), "device": Refines("device"), "precision": Refines("precision")}
    top = stack(**plugins)
    for slot in ("device", "precision"):
        plugins[slot].below = top.below_layer(LAYERS[slot])

    assert top.decide("u", {}) == "precision(device(base))"


def test_below_leaves_out_the_plugins_of_its_own_layer():
    manager = PluginManager(hooks)
    for name in ("student", "teacher"):
        manager.add_plugin(Decides(name), name=name, slot="strategy")

    both = manager.hooks_of(["student", "teacher"])
    assert both.below_layer(LAYERS["strategy"]).implementations("decide") == []


# -- everyone --------------------------------------------------------------------------------------


class Answers:
    """One answer for each of the hooks that everyone answers."""

    def __init__(self, answer, log=None):
        self.answer, self.log_book = answer, log

    @implements(hooks.variables)
    def variables(self, unit):
        return self.answer

    @implements(hooks.reasons)
    def reasons(self, unit):
        return self.answer

    @implements(hooks.told)
    def told(self, unit, applied):
        if self.log_book is not None:
            self.log_book.append((self.answer, unit, applied))

    @implements(hooks.context)
    def context(self, unit):
        return None if self.answer is None else self.entered()

    @implements(hooks.factory)
    def factory(self, unit):
        return None if self.answer is None else self.entered

    @contextmanager
    def entered(self):
        self.log_book.append(f"enter {self.answer}")
        yield
        self.log_book.append(f"exit {self.answer}")


def test_mappings_merge():
    found = stack(base=Answers({"a": 1}), device=Answers({"b": 2}), strategy=Answers(None)).variables("u")

    assert found == {"a": 1, "b": 2}


def test_two_answers_to_a_key_name_both_plugins():
    with pytest.raises(PluginError) as caught:
        stack(base=Answers({"a": 1}), device=Answers({"a": 2})).variables("u")

    assert str(caught.value).splitlines() == [
        "hook variables: base and device both answer a",
        "only one of them can be right: leave base or device out of the stack",
    ]
    assert caught.value.hook == "variables"


def test_sequences_concatenate_bottom_up():
    found = stack(strategy=Answers(("c",)), base=Answers(["a", "b"]), device=Answers(None)).reasons("u")

    assert found == ["a", "b", "c"]


@pytest.mark.parametrize("hook", ["variables", "reasons"])
def test_one_that_does_not_answer_is_an_empty_answer(hook):
    assert not getattr(stack(base=Answers(None)), hook)("u")
    assert getattr(stack(base=Answers(None)), hook)("u") is not None


def test_contexts_are_entered_bottom_up_and_left_top_down():
    log = []
    with stack(device=Answers("device", log), base=Answers("base", log), precision=Answers(None)).context(
        "u"
    ):
        log.append("inside")

    assert log == ["enter base", "enter device", "inside", "exit device", "exit base"]


def test_a_context_nobody_gives_is_an_empty_one():
    with stack(base=Answers(None)).context("u") as entered:
        assert entered is None


def test_a_context_that_fails_to_open_closes_those_below():
    class Fails(Answers):
        @contextmanager
        def entered(self):
            raise OSError("no device")
            yield

    log = []
    top = stack(base=Answers("base", log), device=Fails("device", log))
    with pytest.raises(OSError, match="no device"), top.context("u"):
        log.append("inside")

    assert log == ["enter base"]  # left by the exception, so nothing ran after its yield


def test_factories_are_composed_and_can_be_entered_again_and_again():
    log = []
    factory = stack(device=Answers("device", log), base=Answers("base", log)).factory("u")
    for _ in range(2):
        with factory():
            pass

    assert log == 2 * ["enter base", "enter device", "exit device", "exit base"]


def test_one_factory_is_given_as_it_is():
    base = Answers("base", [])

    assert stack(base=base, device=Answers(None)).factory("u") == base.entered


def test_no_factory_is_none():
    assert stack(base=Answers(None), device=Answers(None)).factory("u") is None


def test_commands_reach_everyone_bottom_up():
    log = []
    stack(extension=Answers("extension", log), base=Answers("base", log)).told("u", True)

    assert log == [("base", "u", True), ("extension", "u", True)]


def test_one_implementation_without_an_answer_is_called_itself():
    device = Answers("device", [])

    assert stack(base=Decides(1), device=device).told == device.told


def test_a_hook_everyone_answers_may_have_nobody():
    empty = stack(base=Decides(1))

    assert (empty.variables("u"), empty.reasons("u"), empty.told("u", True)) == ({}, [], None)


# -- wrapper ---------------------------------------------------------------------------------------


class Wraps:
    def __init__(self, name):
        self.name = name

    @implements(hooks.refine)
    def refine(self, unit, model, phase):
        return f"{self.name}({model})" if phase == "convert" else model


def test_wrappers_refine_inside_out():
    top = stack(extension=Wraps("fp8"), device=Wraps("device"), strategy=Wraps("tp"))

    assert top.refine("u", "m", "convert") == "fp8(tp(device(m)))"
    assert top.refine("u", "m", "post") == "m"


def test_a_value_nobody_wraps_is_given_back():
    assert stack(base=Decides(1)).refine("u", "m", "convert") == "m"


# -- defaults that do nothing ----------------------------------------------------------------------


class Idle:
    @implements(hooks.told)
    @no_op
    def told(self, unit, applied): ...

    @implements(hooks.backward)
    @no_op
    def backward(self, unit): ...


class Backward:
    @implements(hooks.backward)
    def backward(self, unit, loss, boundary):
        return loss


def test_a_step_whose_owner_does_nothing_is_none():
    assert stack(base=Idle()).step("backward") is None


def test_an_owner_that_does_nothing_hides_those_below():
    assert stack(device=Backward(), strategy=Idle()).step("backward") is None


def test_a_step_nobody_implements_is_none():
    assert stack(base=Decides(1)).step("backward") is None


def test_a_step_is_bound_to_the_owners_own_method():
    strategy = Backward()

    assert stack(base=Idle(), strategy=strategy).step("backward") == strategy.backward


def test_a_default_that_does_nothing_is_left_out_of_what_everyone_does():
    device = Answers("device", [])

    assert stack(base=Idle(), device=device).step("told") == device.told
    assert stack(device=device, strategy=Idle()).step("told") == device.told
    assert stack(base=Idle()).step("told") is None
