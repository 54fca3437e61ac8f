"""A device's tensors reach their file through two pieces of pinned memory."""

from __future__ import annotations

import pytest
import staging_job

pytestmark = pytest.mark.simulated


def test_the_bytes_of_any_tensors_arrive_and_the_host_waits_once_a_piece(run_processes):
    ((awkward, empty, many),) = run_processes(staging_job.pieces, world=1)
    assert [awkward[0], empty[0], many[0]] == [True, True, True]
    assert (empty[1:], many[1:]) == ((0, 0), (16, 0))  # 4,000 bytes, 256 in a piece
    assert awkward[2] == 0


def test_the_host_waits_for_each_tensor_of_another_device(run_processes):
    assert run_processes(staging_job.of_two_devices, world=1) == [(True, 6)]  # three, each in two pieces


def test_no_copy_is_still_to_come_once_a_save_has_been_cut_short(run_processes):
    assert run_processes(staging_job.cut_short, world=1) == [1]


@pytest.mark.parametrize("wait", [True, False])
def test_what_was_saved_from_a_device_comes_back(tmp_path, wait, run_processes):
    ((same, waited),) = run_processes(staging_job.save, str(tmp_path), wait, world=1)
    assert same
    assert waited > 20  # 2,800 numbers and as many moments twice, 256 bytes a piece


def test_saves_in_the_background_share_the_pinned_memory_of_the_first_one_until_it_is_given_back(
    tmp_path, run_processes
):
    ((first, second, after),) = run_processes(staging_job.pinned_by_saves, str(tmp_path), world=1)
    assert first > 5
    assert second == 0
    assert after == first


def test_a_device_that_torch_does_not_pin_for_saves_in_the_background_too(tmp_path, run_processes):
    assert run_processes(staging_job.save, str(tmp_path), False, False, world=1) == [(True, 0)]
