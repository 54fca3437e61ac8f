"""The conformance kit: this plugin's code on the simulated device, for want of the hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_testing import conform

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stack", "worlds"),
    [("mps+bf16", "1"), pytest.param("mps", "1", marks=pytest.mark.slow)],
)
def test_it_conforms_on_the_simulated_device(tmp_path: Path, stack: str, worlds: str) -> None:
    options = ("--accel-world", worlds, "--accel-simulate", "none", "--accel-stand-in", "stands_for_mps")

    printed = conform(tmp_path, stack, *options, path=[STAND_IN])

    assert "0 failed, 0 xfailed, 2 skipped" in printed  # float64 and float8, which it does not offer
