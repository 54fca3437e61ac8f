"""A step sends what a loop on torch's public API sends for the same batches: a count has no noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import traffic_problem
from fsdp_problem import GPT, accelerator, plugin
from torch import nn

from accel_core import ParallelismConfig
from accel_fsdp.sharding import meta
from accel_testing import Traffic

OF_TWO = {
    "FSDP2": {"dp_shard": 2},
    "tensor parallel": {"tp": 2},
    "pipeline": {"pp": 2},
}
OF_FOUR = {
    "HSDP": {"dp_replicate": 2, "dp_shard": 2},
    "FSDP2 × tensor parallel": {"dp_shard": 2, "tp": 2},
    "pipeline × FSDP2": {"pp": 2, "dp_shard": 2},
}
ONE_LOSS_FOR_ALL_STAGES = {"broadcast": (1, 4)}
"""More than by hand, by decision: a pipeline's ranks all get the loss, which only the last stage has."""


@pytest.mark.parametrize(("world", "cases"), [(2, OF_TWO), pytest.param(4, OF_FOUR, marks=pytest.mark.full)])
def test_a_window_of_three_with_clipping_sends_what_a_loop_by_hand_sends(world, cases, run_processes):
    for rank, found in enumerate(run_processes(traffic_problem.traffic, cases, world=world, timeout=120)):
        for name, (by_hand, ours) in found.items():
            where = f"{name}, rank {rank}"
            if None not in by_hand.losses:  # the first stage of a pipeline has none
                assert ours.losses == pytest.approx(by_hand.losses, rel=1e-4), where
            decided = ONE_LOSS_FOR_ALL_STAGES if "pp" in cases[name] else {}
            assert by_hand.traffic
            assert ours.traffic == by_hand.traffic | decided, where


def sent_by_prepare(version: int, options: dict[str, Any], blocks: int) -> list[int]:
    """Bytes of each broadcast while a model of some blocks is prepared."""
    run = accelerator(plugin("gpt", version), ParallelismConfig(**options))
    model = GPT(blocks=blocks)
    with Traffic() as found:
        run.prepare(model)
    run.end_training()
    return [size for kind, size in found.calls if kind == "broadcast"]


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize(
    ("world", "options", "dimensions"),
    [
        (2, {}, 1),
        (2, {"dp_replicate": 2, "dp_shard": 1}, 1),
        pytest.param(4, {"dp_replicate": 2, "dp_shard": 2}, 2, marks=pytest.mark.full),
    ],
    ids=["sharded", "2 x 1", "2 x 2"],
)
@pytest.mark.by_default("sharded-2", "2 x 1-2")
def test_prepare_sends_a_block_at_once_over_each_dimension_of_several_ranks(
    version, world, options, dimensions, run_processes
):
    for found in run_processes(sent_by_prepare, version, options, 5, world=world):
        assert len(found) == dimensions * (5 + 1)  # the blocks, and the model around them


def sent_in_small_buffers(limit: int) -> tuple[list[int], list[Any], list[Any]]:
    """Bytes of each broadcast; the tensors that rank 0 had before, and that this rank has afterwards."""
    meta.PARCEL = limit
    run = accelerator(plugin("mlp", 2, auto_wrap_policy="NO_WRAP"))
    torch.manual_seed(run.process_index)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tensors = {
        "turned": torch.randn(64, 32).T,
        "counts": torch.randn(3).to(torch.int16),
        "one": torch.rand(()),
    }
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    before = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    with Traffic() as found:
        model = run.prepare(model)
    after = run.get_state_dict(model, rank0_only=False)
    run.end_training()
    sizes = [size for kind, size in found.calls if kind == "broadcast"]
    return sizes, before, {name: after[name].tolist() for name in before}


def test_a_large_group_is_sent_in_several_buffers(run_processes):
    (sizes, first, mine), (_, _, other) = run_processes(sent_in_small_buffers, 20_000)
    assert sizes == [
        64 * 32 * 4 + 3 * 2 + 4,
        *[64 * 64 * 4 + 64 * 4] * 2,
    ]  # the model's own buffers, two layers
    assert mine == other == first
