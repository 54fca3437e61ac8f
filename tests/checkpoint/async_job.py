"""What test_checkpoint_async does in processes of its own. Returns plain values, which the test compares."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch
from kill_job import fork_ranks
from torch import nn

from accel_core import Accelerator, CheckpointError, InitProcessGroupKwargs
from accel_core.distributed import progress
from accel_core.storage import pending, saver
from accel_core.storage.commit import read_manifest
from accel_core.storage.disk import Disk
from accel_core.storage.ranks import StoreMailbox
from accel_testing.patience import patience


class Job:
    """A prepared run, all of whose numbers can be set."""

    def __init__(self, *, norm: bool = False, seconds: float = 60, **options) -> None:
        torch.manual_seed(0)
        timeout = InitProcessGroupKwargs(timeout=seconds)
        self.accelerator = Accelerator(device="cpu", kwargs_handlers=[timeout], **options)
        self.module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.Tanh())
        self.inner = torch.optim.AdamW(self.module.parameters())
        self.model, self.optimizer = self.accelerator.prepare(self.module, self.inner)
        self.rank = self.accelerator.process_index

    def step(self) -> None:
        self.accelerator.backward(self.model(torch.ones(4, 8)).square().sum())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(value)

    def value(self) -> float:
        (found,) = {value for p in self.module.parameters() for value in p.flatten().tolist()}
        return found

    def said(self, action) -> str:
        try:
            action()
        except CheckpointError as error:
            return str(error)
        return "nothing"


@contextmanager
def writers_wait():
    """Every file waits until the yielded event is set."""
    gate, write = threading.Event(), pending.write_file

    def gated(path, parts, meter=None):
        assert gate.wait(patience(30))
        return write(path, parts, meter)

    pending.write_file = gated
    try:
        yield gate
    finally:
        gate.set()
        pending.write_file = write


@contextmanager
def start_ends(name: str, how: str):
    """The start of a thread of that name raises: it has not begun ("never"), or has "begun"."""
    start = threading.Thread.start

    def interrupted(thread):
        if not thread.name.startswith(name):
            return start(thread)
        if how == "never":
            raise RuntimeError("can't start new thread")
        start(thread)
        time.sleep(0.1)
        raise KeyboardInterrupt

    threading.Thread.start = interrupted
    try:
        yield
    finally:
        threading.Thread.start = start


def interrupting(path, parts, meter=None, write=pending.write_file, told=[]):  # noqa: B006 - once a process
    """Interrupts the main thread once that has come to the end of its training."""
    while not told and not _is_in(sys._current_frames()[threading.main_thread().ident], "end_training"):
        time.sleep(0.01)
    if not told:
        told.append(True)
        os.kill(os.getpid(), signal.SIGINT)
    return slow(path, parts, meter, write)


def _is_in(frame, function: str) -> bool:
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def slow(path, parts, meter=None, write=pending.write_file):
    time.sleep(0.2)
    return write(path, parts, meter)


def full(path, parts, meter=None):
    raise OSError(errno.ENOSPC, "No space left on device")


def one_fails(folder: str, how: str) -> list[str]:
    """What each call says after rank 1 could not write."""
    job, target = Job(), Path(folder) / "here"
    job.accelerator.save_state(target, step=1)
    write = pending.write_file
    if job.rank == 1:
        pending.write_file = full
    if how == "wait":
        said = [job.said(lambda: job.accelerator.save_state(target, step=2))]
    else:
        job.accelerator.save_state(target, step=2, wait=False)
        calls = {
            "next": lambda: job.accelerator.save_state(target, step=3),
            "ask": job.accelerator.wait_for_checkpoint,
            "end": job.accelerator.end_training,
        }
        said = [job.said(calls[how])]
    pending.write_file = write
    if how != "end":
        job.accelerator.save_state(target, step=4)
        job.accelerator.end_training()
    left = sorted(path.name for path in Path(folder).iterdir())
    return [*said, str(read_manifest(Disk(target)).save_id is not None), *left]


def one_dies(folder: str) -> tuple[str, float, list[str]]:
    """Rank 1 dies before its vote: what rank 0 says, and what it leaves."""
    children = fork_ranks(lambda: _die_or_tell(Path(folder)))
    for child in children:
        os.waitpid(child, 0)
    said = json.loads((Path(folder) / "said").read_bytes())
    return said, sorted(path.name for path in Path(folder).iterdir())


def _die_or_tell(folder: Path) -> None:
    job, target = Job(seconds=3), folder / "here"
    job.accelerator.save_state(target, step=1)
    if job.rank == 1:
        pending.write_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    job.accelerator.save_state(target, step=2, wait=False)
    said = job.said(job.accelerator.wait_for_checkpoint)
    (folder / "said").write_text(json.dumps(said))


def plans(folder: str) -> list[int]:
    """How often this rank has planned after each of some saves."""
    job, found, planned = Job(norm=True), [], []
    plan = saver.plan

    def counted(*declarations):
        planned.append(1)
        return plan(*declarations)

    saver.plan = counted
    target = Path(folder) / "here"

    def saved(**options) -> None:
        job.accelerator.save_state(target, **options)
        found.append(len(planned))

    saved()
    saved(wait=False)
    job.step()  # the optimizer has state now
    saved(wait=False)
    saved()
    if job.rank == 1:
        parameter = next(job.module.parameters())
        job.inner.state[parameter]["exp_avg"] = job.inner.state[parameter]["exp_avg"].double()
    found.append(job.said(saved))
    saver.plan = plan
    job.accelerator.end_training()
    return found


def pair_saves(folder: str, count: int) -> tuple[int, list[str]]:
    """How many of this rank's votes saves leave in the store, and the largest vote (bytes)."""
    job, sizes, published = Job(), [], []
    publish = StoreMailbox.put

    def measured(self, key, message):
        sizes.append(len(pending.as_json(message)))
        published.append((self, key))
        publish(self, key, message)

    StoreMailbox.put = measured
    for _ in range(count):
        job.accelerator.save_state(Path(folder) / "here", wait=False)
        job.accelerator.wait_for_checkpoint()
    job.accelerator.wait_for_everyone()
    left = sum(votes.has(key) for votes, key in published)
    StoreMailbox.put = publish
    job.accelerator.end_training()
    return left, max(sizes)


def memory(folder: str) -> list[float]:
    """Anonymous memory over the state's size, that saves of each kind add to a run."""
    accelerator = Accelerator(device="cpu")
    model = nn.ParameterList([nn.Parameter(torch.zeros(1 << 20)) for _ in range(32)])  # 128 MiB
    accelerator.prepare(model)
    size, found = 128 << 20, []
    for wait in (True, False, False):
        before = _anonymous()
        accelerator.save_state(Path(folder) / "here", wait=wait)
        accelerator.wait_for_checkpoint()
        found.append((_anonymous() - before) / size)
    accelerator.end_training()
    return found


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def disk_full(folder: str, wait: bool) -> list[object]:
    """On a disk of 6 MiB, with a checkpoint of 2 MiB: a save, one of 5 MiB, and one of 2 again."""
    libc, disk = ctypes.CDLL(None, use_errno=True), Path(folder)
    new_namespace, private = 0x20000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE: nobody else sees it
    if (
        libc.unshare(new_namespace)
        or libc.mount(b"none", b"/", None, private, None)
        or libc.mount(b"none", os.fsencode(disk), b"tmpfs", 0, b"size=6m")
    ):
        return []
    accelerator = Accelerator(device="cpu")
    small, large = (nn.ParameterList([torch.full((size << 18,), 1.0)]) for size in (2, 3))
    accelerator.prepare(small)
    said: list[object] = []

    def save() -> None:
        try:
            accelerator.save_state(disk / "here", wait=wait)
            accelerator.wait_for_checkpoint()
        except CheckpointError as error:
            said.append(str(error))

    save()
    accelerator.prepare(large)
    save()
    accelerator.run.units.pop()
    said.append(sorted(path.name for path in disk.iterdir()))
    with torch.no_grad():
        small[0].fill_(2.0)
    accelerator.load_state(disk / "here")
    said.append(small[0].unique().tolist())
    save()
    accelerator.end_training()
    return said


def waited_for_on_a_terminal(folder: str) -> str:
    """What a terminal shows while a save under way is waited for."""
    job, shown = Job(), io.StringIO()
    shown.isatty = lambda: True
    progress.SHOW_AFTER = progress.SHOW_EVERY = 0.01
    with writers_wait() as gate, redirect_stderr(shown):
        job.accelerator.save_state(Path(folder) / "here", wait=False)

        def write_when_shown() -> None:
            while job.rank == 0 and not shown.getvalue():
                time.sleep(0.01)
            gate.set()

        threading.Thread(target=write_when_shown, daemon=True).start()
        job.accelerator.wait_for_checkpoint()
    return shown.getvalue()
