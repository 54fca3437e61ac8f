"""The conformance kit, as its author would run it."""

from __future__ import annotations

from pathlib import Path

import pytest

# The kit's layers are small and odd, which a CPU multiplies too.
OPTIONS = (
    *("--accel-reference", "float8_reference"),
    *("--accel-set", "fp8_torchao.multiple_of=1"),
    *("--accel-set", "fp8_torchao.first_and_last=true"),
)


@pytest.fixture(autouse=True)
def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the library once, not in each process."""
    monkeypatch.setenv("ACCEL_TEST_PRELOAD", "torchao.float8")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stack", "levels", "worlds"),
    [
        pytest.param("fp8-torchao", "0,1,2,3,4", "1", marks=pytest.mark.full),
        pytest.param("ddp+fp8-torchao", "0,1,2,3,4", "1,2", marks=pytest.mark.full),
        pytest.param("fsdp+fp8-torchao", "0,1,2,3,4", "2", marks=pytest.mark.full),
    ],
)
def test_the_kit_is_green(tmp_path: Path, stack: str, levels: str, worlds: str, conform) -> None:
    path = [Path(__file__).parent]
    chosen = ("--accel-level", levels, "--accel-world", worlds)
    assert not conform(tmp_path, stack, *chosen, *OPTIONS, path=path).failed


@pytest.mark.timeout(300)
def test_the_quick_kit_is_green(tmp_path: Path, conform) -> None:
    path = [Path(__file__).parent]
    assert not conform(tmp_path, "fp8-torchao", "--accel-quick", *OPTIONS, path=path).failed
