"""Libraries that need a process group find one in a run of one process; the last user takes it away."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from accel_core import join_process_group, leave_process_group


@pytest.fixture
def run(accelerator):
    yield accelerator.run
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_user_joins_a_group_that_works(run):
    user = object()
    join_process_group(run, user)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert (dist.get_rank(), dist.get_world_size(), tensor.tolist()) == (0, 1, [1.0, 1.0])
    leave_process_group(user)
    assert not dist.is_initialized()


def test_the_last_user_destroys_the_group(run):
    first, second = object(), object()
    for user in (first, second, first):
        join_process_group(run, user)
    leave_process_group(first)
    assert dist.is_initialized()
    leave_process_group(first)
    assert dist.is_initialized()
    leave_process_group(second)
    assert not dist.is_initialized()


def test_a_group_of_the_program_stays(run):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    user = object()
    join_process_group(run, user)
    leave_process_group(user)
    assert dist.is_initialized()


def test_a_program_may_replace_the_group(run):
    user = object()
    join_process_group(run, user)
    dist.destroy_process_group()
    join_process_group(run, user)
    leave_process_group(user)
    assert not dist.is_initialized()


def test_a_group_can_be_made_again(run):
    user = object()
    for _ in range(2):
        join_process_group(run, user)
        assert dist.is_initialized()
        leave_process_group(user)
        assert not dist.is_initialized()
