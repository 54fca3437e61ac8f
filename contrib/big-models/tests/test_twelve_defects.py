"""The twelve defects of Accelerate 1.15's big model inference, each absent here.

Each was reproduced on Accelerate. What another file tests is named in `ELSEWHERE`, not tested twice.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from big_model_problems import Model, ids, model, shards
from torch import nn

from accel_big_models import dispatch, empty_weights, load, offload, undo, weights_of
from accel_big_models.planning import plan_from_map
from accel_core import AccelError, ConfigError

ELSEWHERE = {
    "6: two threads fail": "dispatching:test_threads_get_right_answers",
    "8: an error leaves its block there": "dispatching:test_an_error_releases_and_the_next_forward_is_right",
    "9: a graph break for each module": "dispatching:test_compiled_blocks_are_one_graph_each",
    "10: tied weights are loaded once a use": "dispatching:test_a_tied_weight_is_read_once_a_forward",
    "11: a model cannot be pickled": "dispatching:test_a_copy_streams_by_itself",
}


@pytest.mark.parametrize("where", ELSEWHERE.values(), ids=ELSEWHERE)
def test_the_defect_is_tested(where):
    module, _, name = where.partition(":")
    assert callable(getattr(importlib.import_module(f"test_{module}"), name))


@pytest.fixture
def want():
    return model()(ids())


@pytest.fixture
def streamed(tmp_path):
    def load_from(places, **options) -> Model:
        with empty_weights():
            target = Model()
        folder = shards(tmp_path / "c", model())
        return load(target, folder, plan_from_map(target, places, **options), mapped=False)

    return load_from


def test_1_a_folder_of_another_model_is_not_reused(tmp_path, want):
    everything = {"": "disk"}
    for seed in (7, 0):
        target = model(seed)
        dispatch(target, plan_from_map(target, everything), folder=tmp_path, mapped=False)

    assert torch.equal(target(ids()), want)


def test_2_weights_of_the_model_itself_are_not_lost():
    target = offload(model(), "disk", device="cpu", mapped=False)

    assert torch.equal(dict(weights_of(target))["scale"], model().scale)
    assert dict(weights_of(target)).keys() == dict(model().named_parameters()).keys() | {"steps"}


def test_3_and_4_weights_are_never_on_meta_and_a_model_that_is_undone_is_whole(streamed, want):
    target = streamed({"": "disk"})
    assert not any(value.is_meta for _, value in weights_of(target))
    undo(target)

    assert not any(parameter.is_meta for parameter in target.parameters())
    assert torch.equal(target(ids()), want)
    assert torch.equal(target.double()(ids()).float(), model().double()(ids()).float())


@pytest.mark.parametrize("places", [{"": "disk"}, None], ids=["all on disk", "no map"])
def test_5_all_on_disk_and_no_map_load(tmp_path, want, places):
    with empty_weights():
        target = Model()
    chosen = None if places is None else plan_from_map(target, places)

    assert torch.equal(load(target, shards(tmp_path / "c", model()), chosen)(ids()), want)


def test_7_weights_on_disk_have_the_dtype_that_was_asked_for(tmp_path):
    target = model().bfloat16()
    dispatch(target, plan_from_map(target, {"": "disk"}), folder=tmp_path, mapped=False)
    written = sum(path.stat().st_size for path in tmp_path.rglob("weights"))
    size = sum(parameter.nbytes for parameter in model().bfloat16().parameters())

    assert size <= written < 1.2 * size


def test_7_weights_of_another_dtype_are_cast_once_as_they_come(streamed):
    target = streamed({"": "disk"}, dtype=torch.bfloat16)
    assert target(ids()).dtype == torch.bfloat16


def test_8_a_gradient_that_would_be_lost_is_an_error(streamed):
    with pytest.raises(AccelError, match="requires a gradient, and is not on the device"):
        streamed({"": "disk"})(ids()).sum().backward()


def test_8_a_second_dispatch_is_an_error(streamed):
    target = streamed({"": "disk"})
    with pytest.raises(ConfigError, match="is dispatched already"):
        dispatch(target, plan_from_map(target, {"": "disk"}))


class Borrowing(nn.Module):
    """Computes with a layer's weight, and never calls the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))])

    def forward(self, x):
        return nn.functional.linear(x, self.blocks[0][0].weight)


def test_12_a_weight_is_there_without_a_call_of_its_module(streamed, want):
    # `Block.forward` of the model computes with the weight of a layer that it does not call.
    assert torch.equal(streamed({"": "disk"})(ids()), want)


def test_12_outside_of_its_block_it_is_an_error_and_not_a_wrong_number():
    target = offload(Borrowing(), "disk", device="cpu", mapped=False)
    with pytest.raises(RuntimeError):
        target(torch.ones(2, 3))
    whole = offload(undo(target), "disk", device="cpu", whole=["Borrowing"], mapped=False)
    assert torch.equal(whole(torch.ones(2, 3)), undo(whole)(torch.ones(2, 3)))
