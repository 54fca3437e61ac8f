"""A decoder with a schedule, clipping and accumulation has the numbers of one process."""

from __future__ import annotations

import pytest

from accel_testing import decoder

SETTINGS = {"ACCEL__PARALLELISM__CP": "2", "ACCEL__CP__BUFFERS": '{"input_ids": 1, "targets": 1}'}


@pytest.mark.needs("accel-ddp")
def test_a_decoder_trains_as_a_plain_loop(run_processes) -> None:
    for found in run_processes(decoder.trained, world=2, environment={"ACCEL__STRATEGY": "ddp", **SETTINGS}):
        decoder.assert_as_in_one_process(found)
