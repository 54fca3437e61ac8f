"""The package, installed, against the conformance kit, as its author would run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_testing import conform

# The kit's layers are small and odd, which a CPU multiplies too.
OPTIONS = (
    *("--accel-reference", "float8_reference"),
    *("--accel-set", "fp8_torchao.multiple_of=1"),
    *("--accel-set", "fp8_torchao.first_and_last=true"),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stack", "worlds"), [("fp8-torchao", "1"), ("ddp+fp8-torchao", "1,2"), ("fsdp+fp8-torchao", "2")]
)
def test_the_kit_is_green(tmp_path: Path, stack: str, worlds: str) -> None:
    path = [Path(__file__).parent]
    assert " 0 failed" in conform(tmp_path, stack, "--accel-world", worlds, *OPTIONS, path=path)
