"""A decoder with a schedule, clipping and accumulation has the numbers of one process."""

from __future__ import annotations

import pytest

from accel_testing import decoder


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("single", 1),
        pytest.param("ddp", 2, marks=pytest.mark.needs("accel-ddp")),
        pytest.param("fsdp", 2, marks=pytest.mark.needs("accel-fsdp")),
    ],
)
def test_a_decoder_trains_as_a_plain_loop(strategy: str, world: int, run_processes) -> None:
    environment = {"ACCEL__STRATEGY": strategy, "ACCEL__EXTENSIONS": "ema"}
    for found in run_processes(decoder.trained, world=world, environment=environment):
        decoder.assert_as_in_one_process(found)
