"""The conformance kit on the simulated device, which bears the very name `mlu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_testing.simulated import write_distribution


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stack", "worlds", "levels"),
    [
        ("mlu+bf16", "1", "quick"),
        pytest.param("mlu+bf16", "1", "0,1,2", marks=pytest.mark.full),
        pytest.param("mlu+bf16", "1", "3,4", marks=pytest.mark.full),
        pytest.param("mlu+ddp", "1,2", "0,1,2,3,4", marks=[pytest.mark.needs("accel-ddp"), pytest.mark.full]),
    ],
)
def test_it_conforms_on_the_simulated_device(
    tmp_path: Path, stack: str, worlds: str, levels: str, conform
) -> None:
    write_distribution(tmp_path, "torch_mlu", "\n", version="1.30.0+torch2.13.0", requires=())
    options: tuple[str, ...] = ("--accel-world", worlds)
    options += ("--accel-quick",) if levels == "quick" else ("--accel-level", levels)
    options += ("--accel-simulate", "cncl")

    found = conform(tmp_path, stack, *options, path=[Path(__file__).parent / "stand_in"])

    assert found.skipped == ({"fp8"} if levels == "quick" or "1" in levels else set())
