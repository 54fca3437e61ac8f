"""The conformance kit, for every ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accel_testing import Conformance

HALVES = ("mixed_precision[fp16]", "forward_runs_in_the_precision[fp16]", "overflowing_steps_are_skipped[1]")

BY_RANK = "test_ranks_that_use_different_parameters_are_right_or_refused"


def known(stage: int) -> str:
    """What DeepSpeed does otherwise, as the kit's file of known failures."""
    lines = ["test_2_training.py::test_forward_runs_in_the_precision[bf16]  # under bf16 all weights are"]
    if stage:
        lines.append("test_1_device.py::test_models_are_placed_whole  # ZeRO's optimizer holds flat tensors")
    if stage > 1:
        lines.append(f"test_3_parameters.py::{BY_RANK}[world2]  # ZeRO adds up what each rank used")
    if stage and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        lines.append("test_2_training.py::test_forward_runs_in_the_precision[fp16]  # as under bf16")
    else:
        why = "DeepSpeed has no fp16 on this CPU, or none in stage 0"
        lines += [f"test_2_training.py::test_{name}  # {why}" for name in HALVES]
    return "\n".join(lines)


def outcome(conform, folder: Path, stage: int, *options: str) -> tuple[Conformance, set[str]]:
    """What the kit finds, and the checks that are known to fail."""
    xfails = folder / "xfails"
    xfails.write_text(known(stage))
    options = ("--accel-set", f"deepspeed.zero_stage={stage}", "--accel-xfails", str(xfails), *options)
    return conform(folder, "deepspeed", *options), {line.split()[0] for line in known(stage).splitlines()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_trains_as_the_kit_wants(tmp_path: Path, stage: int, conform) -> None:
    found, known_to_fail = outcome(conform, tmp_path, stage, "--accel-level", "2")

    assert found.xfailed == {name for name in known_to_fail if name.startswith("test_2")}
    assert found.skipped == {"several_optimizers"}


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_conforms(tmp_path: Path, stage: int, conform) -> None:
    found, known_to_fail = outcome(conform, tmp_path, stage)

    assert found.xfailed == known_to_fail
    assert found.skipped == {"several_optimizers", "whole_weights", "no_sync", "join", "local_sgd"}
