"""The conformance kit on meshes: replicas, split layers, both with sharding, stages, shared sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_core.testing import conform

# Split where the widths of the kit's networks are even; its other networks stay whole.
PLAN = '{"*": null, "0": rowwise_rep, "3": rowwise_rep, "fixed": colwise_rep}'
SPLIT = ("fsdp+tensor-parallel", f"tensor_parallel.parallelize_plan={PLAN}")
ALL = "0,1,2,3,4"
HALF = (
    "test_mixed_precision[fp16]",
    "test_forward_runs_in_the_precision[fp16]",
    "test_float16_parameters_are_refused_by_name",
    "test_overflowing_steps_are_skipped[1]",
    "test_overflowing_steps_are_skipped[2]",
)
"""fp16 itself is refused: each stage would skip steps of its own."""


def checked(folder: Path, stack: str, settings: tuple[str, ...], levels: str, worlds: str, *more: str) -> str:
    options = [word for setting in settings for word in ("--accel-set", setting)]
    return conform(folder, stack, "--accel-level", levels, "--accel-world", worlds, *options, *more)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stack", "settings", "levels", "worlds"),
    [
        ("fsdp", ("fsdp.dp_replicate_size=2",), "3,4", "4"),
        (SPLIT[0], (SPLIT[1], "fsdp.dp_shard_size=1", "tensor_parallel.tp_size=-1"), ALL, "1,2"),
        (SPLIT[0], (SPLIT[1], "tensor_parallel.tp_size=2"), "3,4", "4"),
        pytest.param("fsdp+cp", ("fsdp.dp_shard_size=1",), ALL, "1,2", marks=pytest.mark.together),
    ],
    ids=["replicas", "layers", "layers x shards", "sequences"],
)
def test_it_conforms_on_a_mesh(
    tmp_path: Path, stack: str, settings: tuple[str, ...], levels: str, worlds: str
) -> None:
    assert "0 failed, 0 xfailed" in checked(tmp_path, stack, settings, levels, worlds)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_it_conforms_in_stages(tmp_path: Path, schedule: str) -> None:
    known = tmp_path / "xfails"
    known.write_text("".join(f"test_2_training.py::{name}  # fp16 is refused by name\n" for name in HALF))
    settings = ("fsdp.pp_size=-1", f"fsdp.pp_schedule={schedule}")

    printed = checked(tmp_path, "fsdp", settings, ALL, "1,2", "--accel-xfails", str(known))

    assert f"0 failed, {len(HALF)} xfailed" in printed
