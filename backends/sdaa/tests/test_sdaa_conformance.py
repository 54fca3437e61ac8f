"""The conformance kit on the simulated device, which bears the very name `sdaa`."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_testing import conform


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stack", "worlds"),
    [("sdaa+bf16", "1"), pytest.param("sdaa+ddp", "1,2", marks=[pytest.mark.together, pytest.mark.slow])],
)
def test_it_conforms_on_the_simulated_device(tmp_path: Path, stack: str, worlds: str) -> None:
    options = ("--accel-world", worlds, "--accel-simulate", "tccl")

    printed = conform(tmp_path, stack, *options, path=[Path(__file__).parent / "stand_in"])

    assert "0 failed, 0 xfailed, 2 skipped" in printed  # float64 and float8, which it does not offer
