"""A decoder with a schedule, clipping and accumulation has the numbers of one process."""

from __future__ import annotations

from megatron_jobs import accelerator

from accel_testing import decoder


def trained() -> decoder.Trace:
    return decoder.trained(whole_windows=True, accelerator=accelerator())


def test_a_decoder_trains_as_a_plain_loop(run_processes) -> None:
    for found in run_processes(trained, world=2):
        decoder.assert_as_in_one_process(found, whole_windows=True)
