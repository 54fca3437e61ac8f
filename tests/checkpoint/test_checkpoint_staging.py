"""A device's tensors reach their file through two pieces of pinned memory."""

from __future__ import annotations

import pytest
import staging_job

from accel_testing.processes import run_processes

pytestmark = pytest.mark.simulated


def test_the_bytes_of_any_tensors_arrive_and_the_host_waits_once_a_piece():
    ((awkward, empty, many),) = run_processes(staging_job.pieces, world=1)
    assert [awkward[0], empty[0], many[0]] == [True, True, True]
    assert (empty[1:], many[1:]) == ((1, 0), (17, 0))  # 6 tensors of 40 bytes in a piece of 256
    assert awkward[2] == 0


@pytest.mark.parametrize("wait", [True, False])
def test_what_was_saved_from_a_device_comes_back(tmp_path, wait):
    ((same, waited),) = run_processes(staging_job.save, str(tmp_path), wait, world=1)
    assert same
    assert waited > 20  # 2,800 numbers and as many moments twice, 256 bytes a piece


def test_a_device_that_torch_does_not_pin_for_saves_in_the_background_too(tmp_path):
    assert run_processes(staging_job.save, str(tmp_path), False, False, world=1) == [(True, 0)]
