"""The conformance kit on meshes: replicas, split layers, both with sharding, stages, shared sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

# Split where the widths of the kit's networks are even; its other networks stay whole.
PLAN = '{"*": null, "0": rowwise_rep, "3": rowwise_rep, "fixed": colwise_rep}'
SPLIT = ("fsdp+tensor-parallel", f"tensor_parallel.parallelize_plan={PLAN}")
ALL = "0,1,2,3,4"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stack", "settings", "levels", "worlds"),
    [
        ("fsdp", ("parallelism.dp_replicate=2",), "3,4", "4"),
        (SPLIT[0], (SPLIT[1], "parallelism.dp_shard=1", "parallelism.tp=-1"), ALL, "1,2"),
        (SPLIT[0], (SPLIT[1], "parallelism.tp=2"), "3,4", "4"),
        ("fsdp", ("parallelism.pp=-1", "fsdp.pp_schedule=1F1B"), ALL, "1,2"),
        ("fsdp", ("parallelism.pp=-1", "fsdp.pp_schedule=Interleaved1F1B"), ALL, "1,2"),
        ("fsdp", ("parallelism.pp=2",), "3,4", "4"),
        pytest.param(
            "fsdp+cp",
            ("parallelism.dp_shard=1", "parallelism.cp=-1"),
            ALL,
            "1,2",
            marks=pytest.mark.needs("accel-context-parallel"),
        ),
        pytest.param(
            "fsdp+tensor-parallel+cp",
            (SPLIT[1], "parallelism.tp=2", "parallelism.cp=2", "parallelism.dp_shard=1"),
            "2,3",
            "4",
            marks=pytest.mark.needs("accel-context-parallel"),
        ),
    ],
    ids=[
        "replicas",
        "layers",
        "layers x shards",
        "stages",
        "interleaved stages",
        "stages x shards",
        "sequences",
        "layers x sequences",
    ],
)
def test_it_conforms_on_a_mesh(
    tmp_path: Path, stack: str, settings: tuple[str, ...], levels: str, worlds: str, conform
) -> None:
    options = [word for setting in settings for word in ("--accel-set", setting)]
    found = conform(tmp_path, stack, "--accel-level", levels, "--accel-world", worlds, *options)
    assert not found.failed
