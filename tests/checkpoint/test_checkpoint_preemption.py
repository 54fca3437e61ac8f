"""SIGTERM on any rank: all ranks save after the same step, and say so."""

from __future__ import annotations

import itertools
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import preemption_job
import pytest
from torch._C._distributed_c10d import HashStore

from accel_core import Accelerator, CheckpointError
from accel_core.runtime import preemption
from accel_core.storage.ranks import StoreMailbox
from accel_testing.patience import patience


def run(run_processes, function, folder, *args, world=2):
    return run_processes(function, str(folder), *args, world=world, timeout=60)


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize(("who", "ranks"), [(0, 2), (1, 2), (-1, 2), (2, 3)])
@pytest.mark.by_default
def test_whoever_is_told_all_ranks_save_after_the_same_step(tmp_path, who, ranks, run_processes):
    (ends,) = run(run_processes, preemption_job.told, tmp_path, who, ranks, who, world=1)
    assert len({end.pop("steps") for end in ends}) == 1
    assert ends == [{"saved": True, "same": True, "undone": True, "code": 0}] * ranks


def test_one_process_saves_and_says_so(tmp_path, run_processes):
    ((end,),) = run(run_processes, preemption_job.told, tmp_path, 0, 1, 7, world=1)
    assert end["saved"]
    assert end["same"]


@pytest.mark.parametrize(
    ("directory", "text"),
    [
        (None, "save_on_preemption was given no path"),
        (3, "3 is not a path"),
        ("nowhere://bucket/run", "nowhere"),
        ("other", "other exists and is not a checkpoint"),
    ],
)
def test_the_first_call_refuses_what_nothing_can_be_saved_to(tmp_path, monkeypatch, directory, text):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(CheckpointError, match=text):
        accelerator.save_on_preemption(directory)
    accelerator.end_training()


@pytest.mark.parametrize("of", [iter, map, np.array])
def test_signals_may_come_one_by_one_and_be_numbers_of_numpy(tmp_path, of):
    numbers = [signal.SIGUSR1, signal.SIGUSR2]
    accelerator = Accelerator(cpu=True)
    before = signal.getsignal(signal.SIGUSR1)
    given = map(int, numbers) if of is map else of(numbers)
    assert not accelerator.save_on_preemption(tmp_path / "saved", signals=given)
    assert all(signal.getsignal(number) is not before for number in numbers)
    accelerator.end_training()
    assert all(signal.getsignal(number) is before for number in numbers)


def test_inside_a_window_it_waits_for_the_boundary(tmp_path, run_processes):
    (said,) = run(run_processes, preemption_job.window, tmp_path, world=1)
    assert said == [False, False, False, True]


def test_a_handler_made_later_may_call_the_one_that_watches(tmp_path, run_processes):
    ((forked, heard),) = run(run_processes, preemption_job.chained, tmp_path, world=1)
    assert forked == 1
    assert heard == ["later", "first"] * 2


def test_a_handler_made_later_stays_where_the_one_before_raises(tmp_path, run_processes):
    (heard,) = run(run_processes, preemption_job.chained_to_one_that_raises, tmp_path, world=1)
    assert heard == ["later", "interrupted"] * 2


@pytest.mark.needs("accel-ddp")
def test_ranks_that_are_steps_apart_meet(tmp_path, run_processes):
    first, second = run(run_processes, preemption_job.apart, tmp_path)
    assert first == second


@pytest.mark.needs("accel-ddp")
def test_a_rank_that_has_finished_stops_nobody(tmp_path, run_processes):
    assert run(run_processes, preemption_job.finished, tmp_path) == [False, False]


@pytest.mark.parametrize(("function", "said"), [("window", "stopped"), ("alone", "watching")])
def test_a_schedulers_job_learns_whether_it_was_stopped_or_had_ended(
    function, said, tmp_path, monkeypatch, run_processes
):
    file = tmp_path / "stop"
    file.touch()
    monkeypatch.setenv("ACCEL_STOP_FILE", str(file))
    run(run_processes, getattr(preemption_job, function), tmp_path, world=1)
    assert file.read_text(encoding="utf-8") == said


@pytest.mark.timeout(60)
def test_no_fault_of_the_thread_that_watches_keeps_a_rank_waiting(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    accelerator.save_on_preemption(tmp_path / "state")
    monkeypatch.setattr(StoreMailbox, "read", lambda *_: {}["no such answer"])
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + patience(10)

    def go_on():
        while time.monotonic() < deadline:
            assert not accelerator.save_on_preemption(tmp_path / "state")
            time.sleep(0.01)

    with pytest.raises(CheckpointError, match=r"ranks cannot agree when: 'no such answer'\nit cannot save"):
        go_on()
    accelerator.end_training()


class CountingStore:
    """A store that counts its requests, for ranks that are threads."""

    def __init__(self):
        self.store, self.requests = HashStore(), 0

    def clone(self):
        return self

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self.store, name)


class Rank:
    def __init__(self, run, store, rank, ranks):
        self.world, self.config = SimpleNamespace(rank=rank, size=ranks, store=store), run.config


@pytest.fixture
def watched(monkeypatch):
    """`watched(count)` makes so many ranks of a job that watch, and their store."""
    monkeypatch.setattr(preemption, "_made", itertools.repeat(0))
    accelerator, made = Accelerator(cpu=True), []

    def watch(here, ranks):
        store = CountingStore()
        jobs = [Rank(accelerator.run, store, rank, ranks) for rank in range(here)]
        made.extend((job, preemption.Preemption(job, ())) for job in jobs)
        return [each for _, each in made], store

    yield watch
    for _, each in made:
        each._ended.set()
    accelerator.end_training()


def test_ranks_of_a_large_job_ask_the_store_less_often(watched):
    _, store = watched(1, 1024)
    time.sleep(2)
    assert store.requests == 1


def test_ranks_agree_with_some_requests_each(watched):
    ranks, store = watched(24, 24)
    ranks[5]._told = True
    assert all(rank._agreed.wait(patience(20)) for rank in ranks)
    assert {rank._last for rank in ranks} == {1}
    assert store.requests < 24 * 30  # ten looks each, until the last rank has heard
