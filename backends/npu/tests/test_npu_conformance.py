"""The conformance kit on the simulated device, which bears the very name `npu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_testing.simulated import write_distribution


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stack", "worlds", "levels"),
    [
        ("npu+bf16", "1", "quick"),
        pytest.param("npu+bf16", "1", "0,1,2", marks=pytest.mark.full),
        pytest.param("npu+bf16", "1", "3,4", marks=pytest.mark.full),
        pytest.param("npu+ddp", "1,2", "0,1,2,3,4", marks=[pytest.mark.needs("accel-ddp"), pytest.mark.full]),
    ],
)
def test_it_conforms_on_the_simulated_device(
    tmp_path: Path, stack: str, worlds: str, levels: str, conform
) -> None:
    write_distribution(tmp_path, "torch_npu", "\n", version="2.13.0", requires=())
    options: tuple[str, ...] = ("--accel-world", worlds)
    options += ("--accel-quick",) if levels == "quick" else ("--accel-level", levels)
    options += ("--accel-simulate", "hccl")

    found = conform(tmp_path, stack, *options, path=[Path(__file__).parent / "stand_in"])

    assert found.skipped == ({"fp8"} if levels == "quick" or "1" in levels else set())
