"""A decoder with a schedule, clipping and accumulation has the numbers of one process on each stack.

Other packages have the same test of their stacks.
"""

from __future__ import annotations

import math

import pytest

from accel_testing import decoder


@pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=pytest.mark.needs("accel-ddp"))], ids=["single", "ddp"]
)
@pytest.mark.parametrize("whole_windows", [False, True], ids=["accumulate", "forward_backward"])
def test_a_decoder_trains_as_a_plain_loop(world, whole_windows, run_processes):
    for found in run_processes(decoder.trained, whole_windows, world=world):
        decoder.assert_as_in_one_process(found, whole_windows=whole_windows)


def test_the_schedule_ends_with_the_last_epoch():
    steps = decoder.EPOCHS * -(-decoder.BATCHES // decoder.WINDOW)
    rates = [0.5 * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)]

    assert decoder.plain().rates == pytest.approx(rates)
