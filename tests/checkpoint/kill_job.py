"""Saving loops that are killed: forked from a warm parent, which afterwards loads what they left.

Every number of the state is the step at which it was saved, so that a mixture of two saves shows.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from accel_core import Accelerator
from accel_core.checkpoint import commit
from accel_core.checkpoint.load import load
from accel_core.checkpoint.save import save

TARGET = "latest"


class Job:
    """A prepared run whose whole state can be set to a number, and read back."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(device="cpu")
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.model, _ = self.accelerator.prepare(model, self.optimizer)
        self.accelerator.register_for_checkpointing(self)
        self.step = 0
        for parameter in model.parameters():
            self.optimizer.state[parameter] = {
                "exp_avg": torch.zeros_like(parameter),
                "step": torch.tensor(0.0),
            }

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def tensors(self) -> list[torch.Tensor]:
        unit = self.accelerator.run.units[0]
        weights = [leaf.shards[0][1] for leaf in unit.hooks.model_state(unit).values()]
        return weights + [value for state in self.optimizer.state.values() for value in state.values()]

    def save(self, folder: Path, step: int) -> None:
        self.step = step
        for tensor in self.tensors():
            tensor.fill_(step)
        save(self.accelerator.run, folder / TARGET, step=step)

    def load(self, folder: Path) -> int:
        """The step at which the checkpoint was saved, which every number in it must agree with."""
        for tensor in self.tensors():
            tensor.fill_(-1)
        load(self.accelerator.run, folder / TARGET)
        found = {value for tensor in self.tensors() for value in tensor.flatten().tolist()}
        assert found == {self.step}, f"a mixture: {found} in step {self.step}"
        return self.step


def fork(action: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        action()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def fork_ranks(action: Callable[[], object], count: int = 2) -> list[int]:
    """Processes that do `action` as the ranks of one world; no launcher, so nobody ends them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def be(rank: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
        os.environ.update(LOCAL_WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ.update(TORCHELASTIC_RUN_ID="kill-test")
        action()

    return [fork(partial(be, rank)) for rank in range(count)]


def committed(folder: Path) -> int:
    """The last step whose save returned before the kill."""
    told = folder / "told"
    return int.from_bytes(told.read_bytes()[-4:], "big") if told.exists() else 0


def save_for_ever(job: Job, folder: Path) -> None:
    with (folder / "told").open("ab", buffering=0) as told:
        for step in range(committed(folder) + 1, 1 << 30):
            job.save(folder, step)
            if job.accelerator.is_main_process:
                told.write(step.to_bytes(4, "big"))


def time_of_save(job: Job, folder: Path) -> float:
    begin = time.perf_counter()
    for _ in range(5):
        job.save(folder, 0)
    return (time.perf_counter() - begin) / 5


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in (TARGET, "told"))


def kill_at_random(folder: str, count: int) -> dict[str, int]:
    """One rank, killed `count` times within its saves; each loop goes on from where the last one died."""
    here, job, randomness = Path(folder), Job(), random.Random(4)
    here.mkdir(parents=True, exist_ok=True)
    seconds = time_of_save(job, here)
    leftovers = 0
    for _ in range(count):
        child = fork(lambda: save_for_ever(job, here))
        time.sleep(randomness.uniform(0.0, 5 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        leftovers += bool(left_behind(here))
        before = committed(here)
        step = job.load(here)
        assert before <= step <= before + 1, f"step {step} was loaded, {before} was the last committed"
        (here / "told").write_bytes(step.to_bytes(4, "big"))
    job.save(here, 1 << 20)
    return {"kills": count, "leftovers": leftovers, "left at the end": len(left_behind(here)), "saves": step}


def kill_ranks_at_random(folder: str, count: int) -> dict[str, int]:
    """Two ranks, one of them killed at random, the other soon after."""
    here, randomness = Path(folder), random.Random(5)
    here.mkdir(parents=True, exist_ok=True)
    job = Job()
    seconds = time_of_save(job, here)
    leftovers = 0
    for _ in range(count):
        ready, told = os.pipe()
        ranks = fork_ranks(partial(_rank, here, told))
        os.read(ready, 1)
        time.sleep(randomness.uniform(0.0, 10 * seconds))
        for child in randomness.sample(ranks, 2):
            os.kill(child, signal.SIGKILL)
            time.sleep(randomness.choice([0.0, seconds]))
        for child in ranks:
            os.waitpid(child, 0)
        os.close(ready)
        os.close(told)
        leftovers += bool(left_behind(here))
        before = committed(here)
        step = job.load(here)
        assert before <= step <= before + 1, f"step {step} was loaded, {before} was the last committed"
        (here / "told").write_bytes(step.to_bytes(4, "big"))
    return {"kills": count, "leftovers": leftovers, "saves": step}


def _rank(folder: Path, ready: int) -> None:
    job = Job()
    if job.accelerator.is_main_process:
        os.write(ready, b"1")
    save_for_ever(job, folder)


def kill_at_each_point(folder: str, exchange: bool, fresh: bool) -> dict[str, int]:
    """One save a point: killed right before the n-th thing it does to the file system, for every n."""
    here, job = Path(folder), Job()
    here.mkdir(parents=True, exist_ok=True)
    outcomes = {"points": 0, "old": 0, "new": 0, "none": 0}
    for point in range(1, 1000):
        if fresh and (here / TARGET).exists():
            shutil.rmtree(here / TARGET)
        if not fresh:
            job.save(here, 7)
        child = fork(lambda point=point: _die_at(job, here, point, exchange=exchange))
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return outcomes
        outcomes["points"] += 1
        if fresh and not commit.locate(here / TARGET).exists():
            outcomes["none"] += 1
            continue
        step = job.load(here)
        assert step in (7, 8)
        outcomes["old" if step == 7 else "new"] += 1
        job.save(here, 7)
        assert not left_behind(here), left_behind(here)
    raise AssertionError("a save does more than 1000 things")


def _die_at(job: Job, folder: Path, point: int, *, exchange: bool) -> None:
    left = point

    def happens(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "fsync", "exchange"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sync, swap = os.fsync, commit._exchange

    def watched_sync(handle: int) -> None:
        happens("fsync", ())
        sync(handle)

    def watched_swap(one: Path, other: Path) -> bool:
        happens("exchange", ())
        done = exchange and swap(one, other)
        happens("exchange", ())
        return done

    os.fsync, commit._exchange = watched_sync, watched_swap
    sys.addaudithook(happens)
    job.save(folder, 8)


def exchange_works() -> bool:
    return hasattr(ctypes.CDLL(None), "renameat2")
