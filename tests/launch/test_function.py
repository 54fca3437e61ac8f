"""Launching a function: results in rank order, failures with their traceback, nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accel_core import Accelerator, GeneralTracker, LaunchError, notebook_launcher

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a test's functions need fork")


@pytest.fixture(autouse=True)
def _no_config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def start(function, *args, n: int = 2):
    return notebook_launcher(function, args, num_processes=n, device="cpu")


def test_each_ranks_result_comes_back_in_rank_order():
    def where(word: str):
        return word, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]

    assert start(where, "here") == [("here", "0", "2", "127.0.0.1"), ("here", "1", "2", "127.0.0.1")]


def test_ranks_can_form_a_group_and_return_tensors():
    def summed():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total

    assert [tensor.item() for tensor in start(summed)] == [3.0, 3.0]


def test_a_failing_rank_is_named_with_its_traceback():
    def fail():
        if os.environ["RANK"] == "1":
            raise ValueError("bad batch")
        signal.pause()

    with pytest.raises(LaunchError) as caught:
        start(fail)

    told = str(caught.value)
    assert told.startswith("rank 1 (local 1) failed: ValueError: bad batch\nTraceback")
    assert told.endswith("ValueError: bad batch")
    assert "in fail" in told
    assert "accel_core" not in told
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


def test_the_rank_that_failed_first_is_named_though_it_takes_longest_to_end():
    def fail():
        if os.environ["RANK"] == "1":
            threading.Thread(target=threading.Event().wait).start()  # which its process waits for
            raise ValueError("bad batch")
        note = Path(os.environ["TORCHELASTIC_ERROR_FILE"].replace("/0/error", "/1/error"))
        while not note.exists():
            time.sleep(0.01)
        raise RuntimeError("the peer is gone")

    with pytest.raises(LaunchError, match=r"^rank 1 \(local 1\) failed: ValueError: bad batch\n"):
        start(fail)


def test_a_result_that_cannot_be_pickled_is_a_failure_that_says_so():
    with pytest.raises(LaunchError, match=r"failed: .*[Pp]ickle.*lambda"):
        start(lambda: lambda: None, n=1)


def test_environment_and_signal_handlers_are_as_before():
    before = dict(os.environ), [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    start(os.getpid, n=1)

    assert (dict(os.environ), [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]) == before


def test_the_agent_stays_quiet(capfd):
    start(os.getpid)

    assert capfd.readouterr() == ("", "")


def test_a_port_may_be_named():
    from accel_testing.processes import reserved_port

    with reserved_port() as port:
        found = notebook_launcher(
            lambda: os.environ["MASTER_PORT"], num_processes=1, device="cpu", use_port=port
        )

    assert found == [str(port)]


@pytest.mark.parametrize(("asked", "lives"), [(None, 2), (0, 1)])
def test_restarts_are_the_files_unless_a_number_is_given_zero_too(tmp_path, asked, lives):
    Path("accel.yaml").write_text("launch: {max_restarts: 1}\n")

    def fail():
        with (tmp_path / "lives").open("a") as file:
            file.write("x")
        raise ValueError("bad batch")

    with pytest.raises(LaunchError, match="bad batch"):
        notebook_launcher(fail, num_processes=1, max_restarts=asked, device="cpu")

    assert len((tmp_path / "lives").read_text()) == lives


def test_a_process_with_a_process_group_of_its_own_starts_no_forks():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(LaunchError, match=r"has a process group(.|\n)*end_training"):
            start(os.getpid)
    finally:
        dist.destroy_process_group()
    assert len(start(os.getpid)) == 2


def test_a_device_that_this_process_has_used_is_refused_before_workers_start(monkeypatch):
    used = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: used)

    with pytest.raises(LaunchError, match=r"already used meta(.|\n)*restart the kernel"):
        notebook_launcher(os.getpid, num_processes=2)
    assert len(start(os.getpid)) == 2  # the CPU can be used before


def test_the_launcher_asks_for_no_device_that_its_forks_may_use(monkeypatch):
    def asked():
        raise AssertionError("a fork cannot use the device now")

    monkeypatch.setattr(torch.cuda, "is_available", asked)

    assert len(start(os.getpid)) == 2


def test_a_launch_after_one_that_failed_frees_nothing_of_that_one_in_its_forks():
    def fail():
        raise ValueError("bad batch")

    gc.disable()  # which would free it here in time, now and then
    try:
        for _ in range(3):
            with pytest.raises(LaunchError, match="bad batch"):
                start(fail)
        assert start(lambda: gc.collect() >= 0) == [True, True]
    finally:
        gc.enable()


def test_a_fork_collects_garbage_only_once_it_has_frozen_what_it_inherits():
    started = []
    real = gc.freeze
    gc.freeze = lambda: (started.append(gc.isenabled()), real())
    try:
        assert start(lambda: (started, gc.isenabled()), n=1) == [([False], True)]
    finally:
        gc.freeze = real
    assert gc.isenabled()


def test_a_function_that_leaves_by_exit_0_returns_nothing():
    assert start(lambda: sys.exit(0), n=1) == [None]


class _Closed(GeneralTracker):
    name = "closed"

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def finish(self) -> None:
        self.mark.touch()


@pytest.mark.needs("accel-ddp")
def test_a_run_that_the_function_leaves_behind_is_ended(tmp_path):
    def leave():
        accelerator = Accelerator(log_with=[_Closed(tmp_path / "closed")])
        accelerator.init_trackers("run")
        accelerator.prepare(torch.nn.Linear(1000, 1000))
        accelerator.save_state(tmp_path / "state", wait=False)

    start(leave)

    assert (tmp_path / "closed").exists()
    assert (tmp_path / "state").exists()


@pytest.mark.full
@pytest.mark.needs("accel-ddp")
def test_a_rank_that_leaves_by_exit_0_is_named_where_others_wait_for_it():
    def one_leaves():
        accelerator = Accelerator()
        if accelerator.process_index == 1:
            sys.exit(0)
        accelerator.wait_for_everyone()

    with pytest.raises(LaunchError, match=r"waited for rank\(s\) 1 of 2, "):
        start(one_leaves)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_thread_that_the_function_leaves_behind_still_has_its_run(tmp_path, pooled):
    def leave():
        accelerator = Accelerator()

        def late():
            time.sleep(0.3)
            accelerator.save({}, tmp_path / "saved")

        ThreadPoolExecutor().submit(late) if pooled else threading.Thread(target=late).start()

    start(leave, n=1)

    assert (tmp_path / "saved").exists()
