"""A process group that the user made, without any launcher's variables: its ranks are the world's."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accel_core import Accelerator
from accel_core.testing.processes import run_processes

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def adopted():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for name in VARIABLES:
        os.environ.pop(name, None)
    accelerator = Accelerator(cpu=True)
    found = (
        accelerator.process_index,
        accelerator.local_process_index,
        accelerator.num_processes,
        accelerator.gather(torch.tensor([accelerator.local_process_index])).tolist(),
    )
    accelerator.end_training()
    still_there = dist.is_initialized()
    dist.destroy_process_group()
    return *found, still_there


@pytest.mark.together
def test_its_ranks_have_devices_of_their_own_and_it_outlives_the_run():
    assert run_processes(adopted) == [(0, 0, 2, [0, 1], True), (1, 1, 2, [0, 1], True)]
