"""The conformance kit: this plugin's code on the simulated device, for want of the hardware."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.mark.simulated
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stack", "worlds", "levels"),
    [
        ("cuda+bf16", "1", "0,1,2"),
        pytest.param("cuda+bf16", "1", "3,4", marks=pytest.mark.full),
        pytest.param(
            "cuda+ddp", "1,2", "0,1,2,3,4", marks=[pytest.mark.needs("accel-ddp"), pytest.mark.full]
        ),
    ],
)
def test_it_conforms_on_the_simulated_device(
    tmp_path: Path, stack: str, worlds: str, levels: str, conform
) -> None:
    options = ("--accel-world", worlds, "--accel-level", levels)
    options += ("--accel-simulate", "nccl", "--accel-stand-in", "stands_for_cuda")

    found = conform(tmp_path, stack, *options, path=[STAND_IN])

    assert found.skipped == set()


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("stack", ["cuda", "cuda+bf16", "cuda+fp16"])
def test_it_conforms_on_a_gpu(tmp_path: Path, stack: str, conform) -> None:
    assert conform(tmp_path, stack).skipped == set()
