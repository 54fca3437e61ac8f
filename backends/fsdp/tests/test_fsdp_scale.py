"""What a rank holds in large worlds, without the machines: torch's fake process group."""

from __future__ import annotations

import pytest
import scale_job


@pytest.mark.parametrize("world", [8, 64, 1024, pytest.param(4096, marks=pytest.mark.full)])
@pytest.mark.parametrize("shape", ["7B", pytest.param("70B", marks=pytest.mark.full)])
def test_a_rank_holds_its_part_of_each_weight_and_no_more(shape, world, run_processes):
    (found,) = run_processes(scale_job.held, shape, world, world=1, timeout=110)
    assert found["found"] == found["due"]
    assert found["found"] < found["weights"] * 4 / world * 1.05 + 4 * 2**20
    print(f"{shape} on {world}: {found['found'] / 2**20:.1f} MiB, wrapped in {found['seconds']:.2f} s")


def last():
    return scale_job.held("7B", 64, rank=63)


def test_so_does_the_last_rank(run_processes):
    (found,) = run_processes(last, world=1)
    assert found["found"] == found["due"]


def hybrid():
    return scale_job.held("7B", 64, rank=9, sharding_strategy="HYBRID_SHARD")


def test_replicas_are_sharded_within_a_node(run_processes):
    (found,) = run_processes(hybrid, world=1)
    assert found["found"] == found["due"]
    assert found["found"] > found["weights"] * 4 / 8 * 0.99
