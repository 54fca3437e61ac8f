"""A process group that the user made, without any launcher's variables: its ranks are the world's."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accel_core import Accelerator, InitProcessGroupKwargs
from accel_testing.patience import patience

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def adopted():
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience(20)))
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


@pytest.mark.needs("accel-ddp")
def test_its_ranks_have_devices_of_their_own_and_it_outlives_the_run(run_processes):
    assert run_processes(adopted) == [(0, 0, 2, [0, 1], True), (1, 1, 2, [0, 1], True)]


def after_the_users_destroy():
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(20)))
    first = Accelerator(cpu=True, kwargs_handlers=[handler])
    dist.destroy_process_group()
    second = Accelerator(cpu=True, kwargs_handlers=[handler])
    first.end_training()
    gathered = second.gather(torch.ones(1)).sum().item()
    second.end_training()
    return gathered, dist.is_initialized()


@pytest.mark.needs("accel-ddp")
def test_a_run_leaves_the_group_alone_that_another_made_after_its_own(run_processes):
    assert run_processes(after_the_users_destroy) == [(2.0, False)] * 2


def adopted_with_options():
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience(20)))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("accel_core.runtime.join").addHandler(handler)
    options = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(90)))
    for _ in range(2):
        Accelerator(cpu=True, kwargs_handlers=[options])
    return lines


@pytest.mark.needs("accel-ddp")
def test_options_that_a_group_of_the_program_does_not_have_are_named_once(run_processes):
    for lines in run_processes(adopted_with_options):
        assert [line.partition(",")[0] for line in lines] == [
            "process_group: the program has made the process group"
        ]
