"""A step sends what a loop by hand sends for the same batches: a count has no noise."""

from __future__ import annotations

import cp_traffic
import pytest
from cp_problem import SPLIT


def compare(run_processes, strategy, fewer=None):
    environment = {"ACCEL__FSDP__TRANSFORMER_CLS_NAMES_TO_WRAP": "Block"} if strategy == "fsdp" else {}
    for found in run_processes(cp_traffic.both, [strategy], world=2, environment=environment):
        (losses, sent), (our_losses, ours_sent) = found[strategy]
        assert our_losses == pytest.approx(losses, rel=1e-4)
        assert sent["all_gather"][0] >= 12  # keys and values, of two layers and three micro-batches
        assert ours_sent == sent | (fewer or {})


@pytest.mark.needs("accel-ddp")
def test_a_window_of_three_with_clipping_sends_what_a_loop_by_hand_sends(run_processes):
    compare(run_processes, "ddp")


@pytest.mark.needs("accel-fsdp")
def test_so_it_does_where_weights_are_sharded(run_processes):
    # To clip, torch's own function reduces a norm of each parameter, ours one number.
    compare(run_processes, "fsdp", fewer={"all_reduce": (1, 4)})


@pytest.mark.needs("accel-ddp")
def test_a_causal_mask_is_made_once_for_all_layers_and_batches_of_a_length(run_processes):
    assert run_processes(cp_traffic.masks, world=2) == [1, 1]


@pytest.mark.needs("accel-fsdp")
def test_ranks_agree_on_nothing_in_a_micro_batch_and_read_no_number(run_processes):
    """Beside split layers too: whether a model attends is each rank's own to say."""
    environment = {"ACCEL__PARALLELISM__DP_SHARD": "1", **SPLIT}
    for sent, reads in run_processes(cp_traffic.in_a_microbatch, world=4, environment=environment):
        assert len([kind for kind, _ in sent if kind == "all_gather"]) >= 4
        assert ("all_reduce", 4) not in sent, "a flag"
        assert reads == []
