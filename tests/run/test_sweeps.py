"""Many Accelerators in one process, as in a sweep: their files, connections and threads do not add up."""

from __future__ import annotations

import gc
import json
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from accel_core import Accelerator, GeneralTracker
from accel_testing.patience import patience

SWEEP = """
import json, os, sys
import torch
from accel_core import Accelerator

how, trials, seen = sys.argv[1], int(sys.argv[2]), []
for number in range(trials):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=str(number))
    accelerator.init_trackers("trial")
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.log({"loss": 1.0}, step=1)
    if how == "saved":
        accelerator.save_state("saved")
    if how == "freed":
        accelerator.free_memory()
    if how == "ended":
        accelerator.end_training()
    processes = ("self", os.getppid())
    seen.append([len(os.listdir(f"/proc/{each}/{kind}")) for each in processes for kind in ("fd", "task")])
if accelerator.process_index == 0:
    print(json.dumps(seen))
"""
"""Prints the files and threads of rank 0 and of the launcher, after each trial."""


@pytest.mark.skipif(sys.platform != "linux", reason="files are counted in /proc")
@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("blocked", ["monitor", ""], ids=["alone", "with what is installed"])
@pytest.mark.parametrize(
    ("how", "trials"),
    [
        ("dropped", 12),
        *(pytest.param(how, 12, marks=pytest.mark.full) for how in ("freed", "saved", "ended")),
        *(pytest.param(how, 200, marks=pytest.mark.full) for how in ("dropped", "freed")),
    ],
)
def test_a_sweep_has_no_more_files_and_threads_after_many_trials(accel, tmp_path, how, trials, blocked):
    (tmp_path / "sweep.py").write_text(SWEEP)

    ended = accel(
        *("launch", "--device", "cpu", "-n", "2", "sweep.py", how, str(trials)),
        environment={"ACCEL_PLUGINS_BLOCK": blocked},
        cwd=tmp_path,
        timeout=60 + 2 * trials,
    )

    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr
    counts = json.loads(ended.stdout.splitlines()[-1])
    early, late = (
        [max(each) for each in zip(*part, strict=True)] for part in (counts[2 : trials // 2], counts[-4:])
    )
    # A thread that is about to end may be counted.
    assert all(after <= before + 1 for before, after in zip(early, late, strict=True)), counts


class Collects:
    """A dataset that collects garbage in its worker, as Python may at any time."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        gc.collect()
        return torch.tensor([float(gc.get_freeze_count() > 0)])


def train_with_workers():
    found = []
    for _ in range(3):
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        workers = {"num_workers": 1, "multiprocessing_context": "fork", "timeout": patience(20)}
        loader = DataLoader(Collects(), batch_size=2, **workers)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            found += batch.flatten().tolist()
        accelerator.end_training()
    return set(found), gc.get_freeze_count(), gc.isenabled()


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")
@pytest.mark.needs("accel-ddp")
def test_a_worker_that_collects_garbage_leaves_the_groups_of_ended_runs_alone(run_processes):
    assert run_processes(train_with_workers) == [({1.0}, 0, True)] * 2


class Closed(GeneralTracker):
    name = "closed"
    times = 0

    def finish(self):
        self.times += 1


def test_a_new_run_finishes_the_trackers_of_runs_that_were_dropped():
    trackers = [Closed(), Closed()]
    for tracker in trackers:
        Accelerator(cpu=True, log_with=tracker).init_trackers("trial")
        gc.collect()
    assert [each.times for each in trackers] == [1, 0]

    Accelerator(cpu=True).end_training()
    Accelerator(cpu=True).end_training()
    assert [each.times for each in trackers] == [1, 1]


class Unclosable(GeneralTracker):
    name = "unclosable"

    def finish(self):
        raise ConnectionError("the server is gone")


def test_a_tracker_that_cannot_close_does_not_keep_the_next_run_from_being_made(capsys):
    Accelerator(cpu=True, log_with=Unclosable()).init_trackers("trial")
    gc.collect()

    Accelerator(cpu=True).end_training()

    assert "ConnectionError: the server is gone" in capsys.readouterr().err


LOSES_A_SAVE = """
import gc, sys
import torch
from accel_core import Accelerator
from accel_core.storage import pending

def fail(*_):
    raise OSError("no room")

pending.commit = fail
for number in range(2):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    if number == 0:
        accelerator.save_state("lost", wait=False)
    del accelerator
    gc.collect()
print("done")
"""


def test_a_save_that_was_lost_is_told_at_exit_though_its_run_was_dropped(run_command, tmp_path):
    ended = run_command(
        [sys.executable, "-c", LOSES_A_SAVE], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    assert (ended.returncode, ended.stdout) == (1, "done\n")
    assert "no room" in ended.stderr
