"""Weights that are away: state dicts hold them, conversions and lost changes are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from big_model_problems import Model, ids, model, shards

from accel_big_models import dispatch, empty_weights, load, offload, undo, weights_of
from accel_big_models.planning import plan_from_map
from accel_core import AccelError


@pytest.fixture
def folder(tmp_path):
    return shards(tmp_path / "c", model())


@pytest.fixture
def streamed(folder) -> Model:
    with empty_weights():
        target = Model()
    return load(target, folder, plan_from_map(target, {"": "disk"}), mapped=False)


def same(state, expected) -> bool:
    return list(state) == list(expected) and all(
        torch.equal(state[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("duplicate", [lambda it: it, copy.deepcopy], ids=["model", "copy"])
def test_a_state_dict_is_whole(streamed, duplicate):
    target = duplicate(streamed)
    state = target.state_dict()

    assert same(state, model().state_dict())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert same(target.blocks[1].state_dict(), model().blocks[1].state_dict())
    assert not target.embedding.weight.numel()


def test_after_undo_a_state_dict_is_torchs_own(streamed):
    undo(streamed)

    assert same(streamed.state_dict(), model().state_dict())
    assert not any(module._state_dict_hooks for module in streamed.modules())
    assert streamed.double()(ids()).dtype == torch.float64


@pytest.mark.parametrize("convert", ["half", "double", lambda it: it.to("meta")])
def test_a_conversion_that_the_next_forward_would_lose_is_refused_before_anything_is_converted(
    streamed, convert
):
    with pytest.raises(
        AccelError, match="comes and goes: in the next forward it would be torch.float32 on cpu"
    ):
        getattr(streamed, convert)() if isinstance(convert, str) else convert(streamed)
    with pytest.raises(AccelError, match="comes and goes"):
        streamed.blocks[1].half()

    assert {it.dtype for it in streamed.parameters()} == {torch.float32}
    assert torch.equal(streamed(ids()), model()(ids()))


def test_a_conversion_to_what_it_is_changes_nothing(streamed):
    names = list(dict(streamed.named_parameters()))
    streamed.float().to("cpu")

    assert list(dict(streamed.named_parameters())) == names
    assert torch.equal(streamed(ids()), model()(ids()))


def test_a_write_to_a_weight_that_is_not_in_memory_is_an_error_in_the_next_forward(streamed):
    with torch.no_grad():
        streamed.blocks[1].gain.mul_(2)

    with pytest.raises(AccelError, match=r"blocks\.1\.gain was written to while it is not in memory"):
        streamed(ids())


@pytest.mark.parametrize(
    "read",
    [lambda it: list(weights_of(it)), lambda it: it.state_dict(), undo, copy.deepcopy],
    ids=["weights_of", "state_dict", "undo", "copy"],
)
def test_a_lost_write_is_an_error_wherever_the_weight_is_read(streamed, read):
    with torch.no_grad():
        streamed.blocks[1].gain.mul_(2)

    for _ in range(2):
        with pytest.raises(AccelError, match=r"blocks\.1\.gain was written to(.|\n)*\nload the model again"):
            read(streamed)


def test_a_write_to_a_weight_in_host_memory_counts_from_the_next_forward_on():
    target, expected = model(), model()
    offload(target, "cpu", device="cpu")
    with torch.no_grad():
        for each in (target, expected):
            each(ids())
            each.blocks[0].gain.mul_(2)
            each.blocks[3].gain.mul_(3)

    assert torch.equal(target(ids()), expected(ids()))


def test_other_data_count_from_the_next_forward_on_wherever_the_weight_lies(streamed):
    expected = model()
    for each in (streamed, expected):
        each(ids())
        each.blocks[1].gain.data = torch.full((32,), 3.0)
    assert same(streamed.state_dict(), expected.state_dict())
    assert torch.equal(dict(weights_of(streamed))["blocks.1.gain"], torch.full((32,), 3.0))
    with torch.no_grad():
        assert torch.equal(streamed(ids()), expected(ids()))
        assert torch.equal(streamed(ids()), expected(ids()))
    assert same(streamed.state_dict(), expected.state_dict())
    streamed.scale.data = expected.scale.data = torch.tensor([2.0])
    assert same(undo(streamed).state_dict(), expected.state_dict())


def test_data_of_another_dtype_are_an_error_in_the_next_forward(streamed):
    streamed.blocks[1].gain.data = streamed.blocks[1].gain.data.half()

    with pytest.raises(AccelError, match=r"blocks\.1\.gain was written to while(.|\n)*another dtype"):
        streamed(ids())


def test_weights_that_stay_are_converted(tmp_path):
    target = model()
    dispatch(target, plan_from_map(target, {"": "disk", "norm": "cpu"}), folder=tmp_path, mapped=False)
    target.blocks[0].register_buffer("scale", torch.ones(2))

    assert target.share_memory().blocks[0].scale.is_shared()
