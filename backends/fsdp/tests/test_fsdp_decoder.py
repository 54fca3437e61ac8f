"""A decoder with a schedule, clipping and accumulation has the numbers of one process."""

from __future__ import annotations

import json

import pytest

from accel_testing import decoder

COPIES = {
    "ACCEL__FSDP__FSDP_VERSION": "1",
    "ACCEL__PARALLELISM__DP_REPLICATE": "2",
    "ACCEL__PARALLELISM__DP_SHARD": "1",
}
LAYERS = {
    "ACCEL__PARALLELISM__DP_SHARD": "1",
    "ACCEL__PARALLELISM__TP": "2",
    "ACCEL__TENSOR_PARALLEL__PARALLELIZE_PLAN": json.dumps(decoder.SPLIT),
}
STAGES = {"ACCEL__PARALLELISM__DP_SHARD": "1", "ACCEL__PARALLELISM__PP": "2"}


@pytest.mark.parametrize(
    ("settings", "whole_windows"),
    [
        ({"ACCEL__FSDP__FSDP_VERSION": "1"}, False),
        ({"ACCEL__FSDP__FSDP_VERSION": "2"}, False),
        (COPIES, False),
        (LAYERS, False),
        (STAGES, True),
    ],
    ids=["version 1", "version 2", "whole copies in version 1", "split layers", "stages"],
)
def test_a_decoder_trains_as_a_plain_loop(settings, whole_windows, run_processes) -> None:
    environment = {"ACCEL__STRATEGY": "fsdp", **settings}
    for found in run_processes(decoder.trained, whole_windows, world=2, environment=environment):
        decoder.assert_as_in_one_process(found, whole_windows=whole_windows)
