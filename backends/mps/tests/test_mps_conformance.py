"""The conformance kit: this plugin's code on the simulated device, for want of the hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stack", "levels"),
    [
        ("mps+bf16", "quick"),
        pytest.param("mps+bf16", "0,1,2", marks=pytest.mark.full),
        pytest.param("mps+bf16", "3,4", marks=pytest.mark.full),
        pytest.param("mps", "0,1,2,3,4", marks=pytest.mark.full),
    ],
)
def test_it_conforms_on_the_simulated_device(tmp_path: Path, stack: str, levels: str, conform) -> None:
    options: tuple[str, ...] = ("--accel-world", "1")
    options += ("--accel-quick",) if levels == "quick" else ("--accel-level", levels)
    options += ("--accel-simulate", "none", "--accel-stand-in", "stands_for_mps")

    found = conform(tmp_path, stack, *options, path=[STAND_IN])

    assert found.skipped == ({"fp8"} if levels == "quick" or "1" in levels else set())
