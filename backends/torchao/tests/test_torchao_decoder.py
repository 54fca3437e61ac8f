"""A decoder with a schedule, clipping and accumulation has nearly the numbers of one float32 process."""

from __future__ import annotations

import pytest

from accel_testing import decoder

# The decoder's layers are smaller than a GPU's kernels take.
SETTINGS = {"ACCEL__MIXED_PRECISION": "fp8-torchao", "ACCEL__FP8_TORCHAO__MULTIPLE_OF": "1"}


@pytest.fixture(autouse=True)
def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the library once, not in each process."""
    monkeypatch.setenv("ACCEL_TEST_PRELOAD", "torchao.float8")


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("single", 1),
        pytest.param("ddp", 2, marks=pytest.mark.needs("accel-ddp")),
        pytest.param("fsdp", 2, marks=pytest.mark.needs("accel-fsdp")),
    ],
)
def test_a_decoder_trains_nearly_as_a_plain_loop(strategy: str, world: int, run_processes) -> None:
    for found in run_processes(
        decoder.trained, world=world, environment={"ACCEL__STRATEGY": strategy, **SETTINGS}
    ):
        decoder.assert_as_in_one_process(found, low_precision=True)
        assert found.rates == pytest.approx(decoder.plain().rates)
