"""A signal that stops a job reaches its loaders' workers too; the state is saved, and no process is left."""

from __future__ import annotations

import signal
import subprocess
import sys

import loader_workers_job
import pytest
from loader_workers_job import outliving, told

from accel_testing.commands import ACCEL, clean_environment
from accel_testing.patience import patience

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, and reads /proc")
WELL = {"code": 0, "saved": True, "left": [], "initialized": True}


def signalled(run_processes, folder, *args, **options):
    (end,) = run_processes(loader_workers_job.signalled, str(folder), options, *args, world=1, timeout=60)
    return end


@pytest.mark.parametrize(
    ("persists", "epoch"),
    [
        pytest.param(False, 0, id="forked before the first call"),
        pytest.param(False, 1, id="forked after the first call"),
        pytest.param(True, 0, id="persistent"),
        pytest.param(True, 1, id="persistent, in the second epoch", marks=pytest.mark.full),
    ],
)
def test_a_signal_to_all_processes_leaves_the_workers_until_the_rank_has_saved(
    persists, epoch, tmp_path, run_processes
):
    assert signalled(run_processes, tmp_path, signal.SIGTERM, epoch, persistent_workers=persists) == WELL


@pytest.mark.parametrize("how", ["user's own signal", "spawn"])
@pytest.mark.full
def test_other_signals_and_ways_of_starting_workers(how, tmp_path, run_processes):
    options = {"multiprocessing_context": "spawn"} if how == "spawn" else {"signals": [signal.SIGUSR2]}
    number = signal.SIGTERM if how == "spawn" else signal.SIGUSR2
    assert signalled(run_processes, tmp_path, number, **options) == WELL


PROGRAM = "import sys; sys.path.insert(0, {tests!r}); import loader_workers_job as job, pathlib; {call}"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")


@pytest.fixture
def started(tmp_path, start_command):
    """`started(command, call)` starts a launcher of two ranks. It gives the launcher and all their pids."""
    launchers = []

    def start(command, call):
        tests = loader_workers_job.__file__.rpartition("/")[0]
        (tmp_path / "train.py").write_text(PROGRAM.format(tests=tests, call=call))
        launchers.append(
            start_command(
                [*command, "2", "train.py"],
                cwd=tmp_path,
                env=clean_environment(),
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return launchers[0], [pid for rank in range(2) for pid in told(tmp_path / f"ready-{rank}-0")]

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param([ACCEL, "launch", "--device", "cpu", "-n"], id="accel", marks=pytest.mark.by_default),
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.full),
    ],
)
def test_ranks_save_if_their_launcher_is_stopped(command, tmp_path, started):
    launcher, pids = started(command, "job.train(pathlib.Path())")
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=patience(60))
    assert (tmp_path / "saved").exists()
    assert outliving(pids, 1) == []
    if command[0] == ACCEL:
        assert launcher.returncode == 128 + signal.SIGTERM
        assert "accel: the processes have 30 s to save and end\n" in said
        assert "Error" not in said


@pytest.mark.needs("accel-ddp")
def test_a_stopped_launcher_says_who_failed_and_ends_the_workers_of_all(tmp_path, started):
    call = "job.train(pathlib.Path(), fails=True)"
    launcher, pids = started([ACCEL, "launch", "--device", "cpu", "-n"], call)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=patience(60))
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "accel: stopped by SIGTERM: rank" in said
    assert "the disk is full" in said
    assert outliving(pids, 1) == []


def test_workers_of_a_rank_that_is_killed_end(tmp_path, run_processes):
    end = signalled(run_processes, tmp_path, signal.SIGKILL, persistent_workers=True)
    assert (end["code"], end["left"]) == (-signal.SIGKILL, [])


def test_a_rank_ends_though_a_worker_hangs(tmp_path, run_processes):
    assert signalled(run_processes, tmp_path, hangs_at=6, persistent_workers=True) == WELL
