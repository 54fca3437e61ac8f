"""Ranks that train until one of them is told to stop. No launcher: nobody else tells them."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

from async_job import Job
from kill_job import fork_ranks

from accel_core import Accelerator


def told(folder: str, who: int, ranks: int, seed: int) -> list[dict]:
    """What each rank says of its end, after rank `who` was told at a random instant."""
    here = Path(folder)
    children = fork_ranks(partial(_train, here), ranks)
    while len(list(here.glob("ready-*"))) < ranks:
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0.0, 0.3))
    for child in children if who < 0 else [children[who]]:
        os.kill(child, signal.SIGTERM)
        os.kill(child, signal.SIGTERM)
    codes = [os.waitpid(child, 0)[1] for child in children]
    return [json.loads((here / f"end-{rank}").read_bytes()) | {"code": codes[rank]} for rank in range(ranks)]


def _train(folder: Path) -> None:
    job, steps, saved, before = Job(), 0, False, signal.getsignal(signal.SIGTERM)
    asleep = random.Random(job.rank)
    while not saved and steps < 5000:
        job.step()  # a collective, which waits for the other ranks
        steps += 1
        time.sleep(asleep.uniform(0.0, 0.01))
        saved = job.accelerator.save_on_preemption(folder / "here", step=steps)
        (folder / f"ready-{job.rank}").touch()
    value = job.module[0].bias.detach().tolist()
    job.accelerator.load_state(folder / "here")
    same = value == job.module[0].bias.detach().tolist()
    job.accelerator.end_training()
    undone = signal.getsignal(signal.SIGTERM) == before
    end = {"steps": steps, "saved": saved, "same": same, "undone": undone}
    (folder / f"end-{job.rank}").write_text(json.dumps(end))


def window(folder: str) -> list[bool]:
    """What it says at each micro-batch of a window, after the signal."""
    job = Job(gradient_accumulation_steps=3)
    said = [job.accelerator.save_on_preemption(Path(folder) / "here")]
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    for _ in range(3):
        with job.accelerator.accumulate(job.model):
            job.step()
            said.append(job.accelerator.save_on_preemption(Path(folder) / "here"))
    job.accelerator.end_training()
    return said


def apart(folder: str) -> int:
    """Rank 1 stays behind without a collective; the last step."""
    job, steps, target = Job(), 0, Path(folder) / "here"
    while not job.accelerator.save_on_preemption(target):
        steps += 1
        if job.rank == 0 and steps == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2 if job.rank == 1 else 0.02)
    job.accelerator.end_training()
    return steps


def finished(folder: str) -> bool:
    """What the last step says, when rank 0 is told before its own, and rank 1 has ended already."""
    job = Job()
    for step in range(3):
        if job.rank == 0 and step == 2:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        said = job.accelerator.save_on_preemption(Path(folder) / "here")
    job.accelerator.end_training()
    return said


def alone(folder: str) -> None:
    """One process whose loop ends before it is told to stop."""
    job = Job()
    assert not job.accelerator.save_on_preemption(Path(folder) / "here")
    os.kill(os.getpid(), signal.SIGTERM)
    job.accelerator.end_training()


def chained(folder):
    """A handler made later calls the one before it: in a forked process, and after the run."""
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("first"))
    accelerator = Accelerator(cpu=True)
    accelerator.save_on_preemption(f"{folder}/state")
    watching = signal.getsignal(signal.SIGTERM)

    def later(number, frame):
        heard.append("later")
        watching(number, frame)

    signal.signal(signal.SIGTERM, later)
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGTERM)
        os._exit(heard == ["later", "first"])
    forked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    accelerator.end_training()
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    return forked, heard


def chained_to_one_that_raises(folder):
    """A handler made later calls the one before it, which ends in an exception, as Ctrl-C's does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    accelerator = Accelerator(cpu=True)
    accelerator.save_on_preemption(f"{folder}/state")
    watching, heard = signal.getsignal(signal.SIGTERM), []

    def later(number, frame):
        heard.append("later")
        watching(number, frame)

    signal.signal(signal.SIGTERM, later)
    accelerator.end_training()
    for _ in range(2):
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            heard.append("interrupted")
    return heard
