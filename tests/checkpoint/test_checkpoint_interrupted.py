"""Ctrl-C, forks, threads and garbage collection while a save is under way or watched for."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import async_job
import pytest
import torch
from exit_job import at_exit
from lookup import manifest_in

from accel_core import Accelerator, CheckpointError, GeneralTracker
from accel_core.storage import layout, pending
from accel_testing.patience import patience


@pytest.fixture
def job():
    made = async_job.Job()
    yield made
    made.accelerator.end_training()


@pytest.fixture
def interrupt(monkeypatch):
    """The main thread's next wait is ended by Ctrl-C."""
    wait = threading.Event.wait

    def once(event, timeout=None):
        if threading.current_thread() is not threading.main_thread():
            return wait(event, timeout)
        monkeypatch.setattr(threading.Event, "wait", wait)
        raise KeyboardInterrupt

    return lambda: monkeypatch.setattr(threading.Event, "wait", once)


def test_a_save_whose_wait_was_interrupted_is_still_waited_for_by_the_next(job, tmp_path, interrupt):
    job.set(1.0)
    with async_job.writers_wait() as gate:
        job.accelerator.save_state(tmp_path / "one", wait=False)
        job.set(2.0)
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            job.accelerator.wait_for_checkpoint()
        threading.Timer(0.2, gate.set).start()
        job.accelerator.save_state(tmp_path / "two", wait=False)
    job.accelerator.wait_for_checkpoint()
    for name, value in [("one", 1.0), ("two", 2.0)]:
        job.accelerator.load_state(tmp_path / name)
        assert job.value() == value


def test_the_next_save_goes_on_after_ctrl_c_while_the_first_copy_was_laid_out(job, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(layout, "_rooms", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.accelerator.save_state(tmp_path / "one", wait=False)
    job.accelerator.save_state(tmp_path / "one", wait=False)
    job.accelerator.wait_for_checkpoint()


def test_a_save_whose_thread_could_not_be_started_is_written_at_once(job, tmp_path):
    with async_job.start_ends("save ", "never"):
        job.accelerator.save_state(tmp_path / "one", wait=False)
    job.accelerator.load_state(tmp_path / "one")


@pytest.mark.timeout(60)
def test_a_save_whose_start_was_interrupted_once_its_thread_had_begun_is_waited_for(job, tmp_path):
    with async_job.start_ends("save ", "begun"), pytest.raises(KeyboardInterrupt):
        job.accelerator.save_state(tmp_path / "one", wait=False)
    job.accelerator.wait_for_checkpoint()
    job.accelerator.load_state(tmp_path / "one")


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_ctrl_c_as_a_checkpoint_gets_its_name_leaves_a_whole_one(job, tmp_path, monkeypatch, before):
    commit = pending.commit

    def interrupted(*arguments):
        if not before:
            commit(*arguments)
        raise KeyboardInterrupt

    job.set(1.0)
    job.accelerator.save_state(tmp_path / "here")
    job.set(2.0)
    monkeypatch.setattr(pending, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.accelerator.save_state(tmp_path / "here")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="rank 0: KeyboardInterrupt"):
        job.accelerator.wait_for_checkpoint()
    job.accelerator.load_state(tmp_path / "here")
    assert job.value() == (1.0 if before else 2.0)
    job.accelerator.save_state(tmp_path / "here")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_run_whose_end_was_interrupted_has_not_ended(job, tmp_path, interrupt):
    with async_job.writers_wait():
        job.accelerator.save_state(tmp_path / "here", wait=False)
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            job.accelerator.end_training()
        assert not job.accelerator.run.ended
    job.accelerator.end_training()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.full
def test_a_script_that_is_interrupted_at_its_end_waits_for_its_last_save(tmp_path, run_command):
    # Whoever starts the tests in the background has Ctrl-C ignored.
    trouble = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    trouble += "; async_job.pending.write_file = async_job.interrupting"
    ended = at_exit(run_command, tmp_path, trouble, "job.accelerator.end_training()")
    assert "KeyboardInterrupt" in ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "here"]


@pytest.mark.full
def test_a_failed_save_of_a_run_that_is_garbage_is_told_at_the_end(tmp_path, run_command):
    last = "import gc, time; saver = job.accelerator.run.checkpoints._saver; thread = saver._pending._thread"
    last += "; thread.join(); del saver, thread, job; gc.collect()"
    ended = at_exit(run_command, tmp_path, "async_job.pending.write_file = async_job.full", last)
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr


@pytest.mark.full
def test_a_fork_says_nothing_of_its_parents_save(tmp_path, run_command):
    slow = "async_job.pending.write_file = async_job.slow"
    fork = "import os, warnings; warnings.simplefilter('ignore')"  # newer Pythons warn of threads
    fork += "; child = os.fork(); child or sys.exit(0); assert os.waitpid(child, 0)[1] == 0"
    ended = at_exit(run_command, tmp_path, slow, fork)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert manifest_in(tmp_path / "here").exists()


def test_the_first_copy_may_be_made_in_inference_mode_and_on_any_default_device(job, tmp_path):
    torch.set_default_device("meta")
    try:
        with torch.inference_mode():
            job.accelerator.save_state(tmp_path / "one", wait=False)
        job.set(2.0)
        job.accelerator.save_state(tmp_path / "two", wait=False)
        job.accelerator.wait_for_checkpoint()
    finally:
        torch.set_default_device(None)
    job.set(3.0)
    torch.set_default_device("meta")
    try:
        job.accelerator.load_state(tmp_path / "two")
    finally:
        torch.set_default_device(None)
    assert job.value() == 2.0


def test_state_that_is_loaded_in_inference_mode_is_trained_on(job, tmp_path):
    job.step()
    job.accelerator.save_state(tmp_path / "here")
    other = async_job.Job()
    with torch.inference_mode():
        other.accelerator.load_state(tmp_path / "here")
    other.step()
    assert not any(parameter.is_inference() for parameter in other.module.parameters())
    other.accelerator.end_training()


def test_freed_memory_is_the_copys_too(job, tmp_path):
    job.accelerator.save_state(tmp_path / "here", wait=False)
    job.accelerator.wait_for_checkpoint()
    assert job.accelerator.run.checkpoints._saver._layout is not None
    job.accelerator.free_memory()
    assert job.accelerator.run.checkpoints._saver._layout is None


# -- clean-up ----------------------------------------------------------------------------------------


class Tracker(GeneralTracker):
    def __init__(self, name, fails=None):
        self.name, self.fails, self.finished = name, fails, 0

    def log(self, values, step=None, **options):
        pass

    def finish(self):
        self.finished += 1
        if self.fails:
            raise self.fails


def test_what_fails_at_the_end_of_a_run_leaves_nothing_else_undone(tmp_path, monkeypatch, capfd):
    trackers = [Tracker("one", ConnectionError("night")), Tracker("two", OSError("disk")), Tracker("three")]
    job = async_job.Job(log_with=trackers, mixed_precision="bf16")
    job.accelerator.init_trackers("project")
    monkeypatch.setattr(pending, "write_file", async_job.full)
    job.accelerator.save_state(tmp_path / "here", wait=False)
    with pytest.raises(CheckpointError, match="No space left"):
        job.accelerator.end_training()
    assert [each.finished for each in trackers] == [1, 1, 1]
    told = capfd.readouterr().err
    assert "tracker 'one' cannot close" in told
    assert "tracker 'two' cannot close" in told
    assert not job.module._forward_hooks
    job.accelerator.end_training()


# -- signals -----------------------------------------------------------------------------------------


@pytest.fixture
def own_handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def fork_and_end(folder):
    """How a forked child ends that is told to, while its parent watches for the same signal."""
    job = async_job.Job()
    assert not job.accelerator.save_on_preemption(folder)
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, b"!")  # Python forgets signals that come while it forks
        while True:  # not pause(), which one that comes just before it does not end
            time.sleep(0.05)
    os.read(reads, 1)
    os.kill(child, signal.SIGTERM)
    ended = os.waitpid(child, 0)[1]
    job.accelerator.end_training()
    return os.WTERMSIG(ended)


def test_a_forked_child_is_ended_by_the_signal(tmp_path, run_processes):
    assert run_processes(fork_and_end, str(tmp_path), world=1, timeout=60) == [signal.SIGTERM]


def test_a_run_that_is_garbage_gives_the_signal_back(tmp_path, own_handler):
    def train():
        accelerator = Accelerator(cpu=True)
        accelerator.save_on_preemption(tmp_path / "here")

    signal.signal(signal.SIGTERM, before := lambda *_: None)
    train()
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_ends_in_a_thread_hands_the_signal_on(tmp_path, own_handler):
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    accelerator = Accelerator(cpu=True)
    accelerator.save_on_preemption(tmp_path / "here")
    thread = threading.Thread(target=accelerator.end_training)
    thread.start()
    thread.join()
    assert accelerator.run.ended
    os.kill(os.getpid(), signal.SIGTERM)
    assert told == [1]


def test_a_handler_that_is_not_pythons_is_no_obstacle(tmp_path, own_handler, monkeypatch):
    set_handler = signal.signal
    monkeypatch.setattr(signal, "signal", lambda *args: set_handler(*args) and None)
    accelerator = Accelerator(cpu=True)
    accelerator.save_on_preemption(tmp_path / "here")
    accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_any_of_the_signals_that_were_named_is_heard(job, tmp_path, number):
    signals = [signal.SIGTERM, signal.SIGUSR1]
    before = [signal.getsignal(each) for each in signals]
    assert not job.accelerator.save_on_preemption(tmp_path / "here", signals=signals)
    os.kill(os.getpid(), number)
    assert job.accelerator.run.stop_signals._preemption._agreed.wait(patience(30))
    assert job.accelerator.save_on_preemption(tmp_path / "here")
    assert manifest_in(tmp_path / "here").exists()
    job.accelerator.end_training()
    assert [signal.getsignal(each) for each in signals] == before
