"""The conformance kit, as its author would run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_testing import conform

# The kit's own features are no multiples of 16, which the library needs.
OPTIONS = (
    *("--accel-network", "te_kit_network"),
    *("--accel-reference", "te_reference"),
    *("--accel-set", "fp8_te.recipe=current"),
    *("--accel-set", "fp8_te.pad_tokens=true"),
    *("--accel-set", "fp8_te.in_evaluation=true"),
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stack", "levels", "worlds"),
    [
        ("fp8-te", "0,2", "1"),
        pytest.param("fp8-te", "1,3,4", "1", marks=pytest.mark.slow),
        pytest.param("ddp+fp8-te", "0,1,2,3,4", "1,2", marks=pytest.mark.slow),
        pytest.param("fsdp+fp8-te", "0,1,2,3,4", "2", marks=pytest.mark.slow),
    ],
)
def test_the_kit_is_green(tmp_path: Path, stack: str, levels: str, worlds: str) -> None:
    here = Path(__file__).parent
    chosen = ("--accel-level", levels, "--accel-world", worlds)
    assert " 0 failed" in conform(tmp_path, stack, *chosen, *OPTIONS, path=[here, here / "stand_in"])
