"""Ranks whose loaders have workers, and a signal that stops all of their processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from functools import partial
from multiprocessing import util
from pathlib import Path

import torch
from kill_job import fork
from torch.utils.data import DataLoader, Dataset

from accel_core import Accelerator
from accel_testing.patience import patience


class Numbers(Dataset):
    def __init__(self, length: int, hangs_at: int = -1) -> None:
        self.length, self.hangs_at = length, hangs_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        while index == self.hangs_at:
            time.sleep(1)
        time.sleep(0.01)
        return torch.tensor([float(index)])


def note_worker(folder: Path, worker: int) -> None:
    """The worker_init_fn of the user's own."""
    (folder / f"worker-{os.getpid()}").touch()


def train(
    folder: Path,
    length: int = 4000,
    epochs: int = 1,
    hangs_at: int = -1,
    fails=False,
    signals=(signal.SIGTERM,),
    **options,
) -> None:
    """Train until told to stop. In each epoch step 3 says so, with the pids of the workers."""
    accelerator = Accelerator(device="cpu")
    model = torch.nn.Linear(1, 1)
    init = partial(note_worker, folder)
    loader = DataLoader(Numbers(length, hangs_at), num_workers=2, worker_init_fn=init, **options)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-9), loader)
    for _ in range(epochs):
        for step, batch in enumerate(loader):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                _tell(folder / f"ready-{accelerator.process_index}-{loader.epoch}")
            saved = accelerator.save_on_preemption(folder / "saved", step=step, signals=signals)
            while step == 3 and hangs_at > 0 and not saved:  # there is no data to go on with
                time.sleep(0.01)
                saved = accelerator.save_on_preemption(folder / "saved", step=step)
            if saved:
                if fails:
                    raise OSError("the disk is full")
                break
    accelerator.end_training()


def _tell(file: Path) -> None:
    workers = [child.pid for child in multiprocessing.active_children()]
    part = file.with_suffix(".part")
    part.write_text(json.dumps([os.getpid(), *workers]))
    part.rename(file)


def told(file: Path) -> list[int]:
    """The pids of a rank and of its workers, once it is there."""
    deadline = time.monotonic() + patience(60)
    while not file.exists():
        assert time.monotonic() < deadline, f"no {file.name}"
        time.sleep(0.01)
    return json.loads(file.read_text())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def outliving(pids: list[int], seconds: float) -> list[int]:
    """The processes that go on for so long."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def signalled(folder: str, options: dict, number: int = signal.SIGTERM, epoch: int = 0) -> dict:
    """The end of a rank, after a signal in this epoch to all its processes; SIGKILL to itself only."""
    here = Path(folder)
    options.setdefault("multiprocessing_context", "fork")  # not that of this process, which is slow
    if epoch:
        options |= {"length": 24, "epochs": 40}
    rank = fork(partial(_alone, partial(train, here, **options)))
    pids = told(here / f"ready-0-{epoch}")
    (os.kill if number == signal.SIGKILL else os.killpg)(rank, number)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    noted = sorted(int(path.name.partition("-")[2]) for path in here.glob("worker-*"))
    return {
        "code": code,
        "saved": (here / "saved").exists(),
        "left": outliving(pids, patience(10)),
        "initialized": set(pids[1:]) <= set(noted),
    }


def _alone(action) -> None:
    os.setsid()
    action()
    util._exit_function()  # what an interpreter does at its end, and a fork does not
