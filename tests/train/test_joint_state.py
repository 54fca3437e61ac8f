"""State of parameters that are stepped as one tensor: one set of moments, one step."""

from __future__ import annotations

from accel_core import JointState, TensorTemplate, unplaceable_state


def moments(dtype="float32"):
    return TensorTemplate("like_param", (2, 2), dtype)


def step(value):
    return TensorTemplate("scalar", (), "float32", number=lambda: value)


def test_parameters_with_equal_state_agree():
    state = {"exp_avg": moments(), "step": step(3.0)}
    joint = JointState.of(["a", "b"], {"a": state, "b": state, "elsewhere": {}})
    assert joint.known == {"a": state, "b": state}
    assert joint.new == ()
    assert joint.wanted == state
    assert joint.disagreement() is None


def test_a_parameter_without_state_is_new_among_others():
    joint = JointState.of(["a", "b", "b"], {"a": {"exp_avg": moments()}, "b": {}})
    assert joint.new == ("b",)
    assert joint.disagreement() is None


def test_nothing_is_new_if_no_parameter_has_state():
    joint = JointState.of(["a", "b"], {})
    assert joint.new == ()
    assert joint.wanted == {}
    assert joint.disagreement() is None


def test_other_state_is_a_disagreement():
    joint = JointState.of(["a", "b"], {"a": {"exp_avg": moments()}, "b": {"momentum": moments()}})
    assert joint.disagreement() == "a has ['exp_avg'], b ['momentum'], and they are stepped as one"


def test_another_dtype_is_a_disagreement():
    joint = JointState.of(["a", "b"], {"a": {"m": moments()}, "b": {"m": moments("bfloat16")}})
    assert joint.disagreement() is not None


def test_another_step_is_a_disagreement():
    joint = JointState.of(["a", "b"], {"a": {"step": step(3.0)}, "b": {"step": step(5.0)}})
    assert joint.disagreement() == "step of a is 3, of b 5, and they are stepped as one"


def test_only_the_numbers_that_are_shared_are_compared():
    of_a, of_b = (
        {"step": step(3.0), "rate": step(1.0)},
        {"step": step(3.0), "rate": step(2.0), "m": moments()},
    )
    joint = JointState.of(["a", "b"], {"a": of_a, "b": of_b})
    assert joint.disagreement(keys=("step",)) is None
    assert joint.disagreement(keys=("rate",)) is not None


def test_factored_moments_and_objects_have_no_place():
    row = TensorTemplate("other", (2,), "float32")
    template = {"a": {"row": row, "exp_avg": moments(), "step": step(1.0)}}
    assert unplaceable_state(template, {"b": {"history": [1, 2]}, "c": {}}) == ["b/history", "a/row"]
