"""A step sends what a loop on torch's public API sends for the same batches: a count has no noise."""

from __future__ import annotations

import pytest
import traffic_problem

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
