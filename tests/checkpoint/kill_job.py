"""Saving loops that are killed: forked from a warm parent, which afterwards loads what they left.

Every number of the state is the step at which it was saved, so that a mixture of two saves shows.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from accel_core import Accelerator, ProjectConfiguration
from accel_core.storage import disk
from accel_core.storage.commit import commits, read_manifest
from accel_core.storage.disk import Disk
from accel_testing.processes import reserved_port

INPUTS = torch.ones(4, 64)


class Job:
    """A prepared run whose whole state can be set to a number, and read back.

    how: words. `async`: saves do not wait. `numbered`: checkpoints are named for the user, and one is
    kept; else they replace each other.
    """

    def __init__(self, folder: str | Path, how: str = "") -> None:
        disk.BEGIN_SECONDS = 0.0  # nobody saves beside: an empty folder is of a save that was killed
        self.folder, self.waits = Path(folder), "async" not in how
        self.numbered = "numbered" in how
        self.target = None if self.numbered else self.folder / "latest"
        project = ProjectConfiguration(
            project_dir=str(folder),
            automatic_checkpoint_naming=self.numbered,
            total_limit=1,
        )
        self.accelerator = Accelerator(device="cpu", project_config=project)
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.model, self.prepared = self.accelerator.prepare(model, self.optimizer)
        self.accelerator.register_for_checkpointing(self)
        self.step = 0
        for parameter in model.parameters():
            self.optimizer.state[parameter] = {
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
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

    def fill(self, value: int) -> None:
        self.step = value
        for tensor in self.tensors():
            tensor.fill_(value)

    def save(self, step: int) -> None:
        self.fill(step)
        self.accelerator.save_state(self.target, step=step, wait=self.waits)

    def load(self) -> int:
        """The step at which the checkpoint was saved, which every number in it must agree with."""
        self.fill(-1)
        self.accelerator.load_state(self.target)
        step, found = self.step, {value for tensor in self.tensors() for value in tensor.flatten().tolist()}
        assert found == {step}, f"a mixture: {found} in step {step}"
        losses = self.go_on()
        self.fill(step)
        assert self.go_on() == losses, "it goes on in another way"
        return step

    def go_on(self) -> list[float]:
        """The losses of the next steps."""
        losses = []
        for _ in range(2):
            loss = self.model(INPUTS).square().mean()
            self.accelerator.backward(loss)
            self.prepared.step()
            self.prepared.zero_grad()
            losses.append(loss.item())
        return losses

    def places(self) -> list[Disk]:
        """The folders of checkpoints, whole or not."""
        if self.target is not None:
            return [Disk(self.target)]
        folder = self.folder / "checkpoints"
        return [Disk(path) for path in folder.iterdir()] if folder.exists() else []

    def exists(self) -> bool:
        return any(map(commits, self.places()))

    def left_behind(self) -> list[str]:
        """What lies in the folders of checkpoints and belongs to none."""
        found = []
        for place in self.places():
            manifest = read_manifest(place) if commits(place) else None
            whole = {f"manifest-{manifest.number:08d}.json", manifest.save_id} if manifest else set()
            found += [f"{place.name}/{name}" for name in place.list() if name not in {*whole, "notes"}]
            found += [] if manifest else [place.name]
        return found

    def committed(self) -> int:
        """The last step whose save was known to be complete before the kill."""
        told = self.folder / "told"
        return int.from_bytes(told.read_bytes()[-4:], "big") if told.exists() else 0

    def tell(self, step: int) -> None:
        with (self.folder / "told").open("ab", buffering=0) as told:
            told.write(step.to_bytes(4, "big"))

    def save_for_ever(self) -> None:
        """A save that does not wait is known to be complete when the next one has begun."""
        for step in range(self.committed() + 1, 1 << 30):
            self.save(step)
            if self.accelerator.is_main_process:
                self.tell(step if self.waits else step - 1)

    def check(self) -> int:
        """What is loaded after a kill: the last one known to be complete, or one that came after."""
        before = self.committed()
        step = self.load()
        later = 1 if self.waits else 2
        assert before <= step <= before + later, f"step {step} was loaded, {before} was the last committed"
        self.tell(step)
        return step


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

    def be(rank: int, port: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
        os.environ.update(LOCAL_WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(TORCHELASTIC_RUN_ID="kill-test")
        action()

    with reserved_port() as port:
        return [fork(partial(be, rank, port)) for rank in range(count)]


def kill_at_random(folder: str, how: str, count: int) -> dict[str, int]:
    """One rank, killed `count` times within its saves; each loop goes on from where the last one died."""
    job, randomness = Job(folder, how), random.Random(how)
    job.save(0)
    job.accelerator.wait_for_checkpoint()
    leftovers = 0
    for _ in range(count):
        with _moment(randomness) as reached:
            child = fork(partial(_save_until_killed, job, reached))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        leftovers += bool(job.left_behind())
        step = job.check()
    job.save(1 << 20)
    job.accelerator.wait_for_checkpoint()
    return {"kills": count, "leftovers": leftovers, "left at the end": len(job.left_behind()), "saves": step}


def kill_ranks_at_random(folder: str, how: str, count: int) -> dict[str, int]:
    """Two ranks, one of them killed at random within its saves, the other soon after."""
    job, randomness = Job(folder, how), random.Random(how)
    job.save(0)
    job.accelerator.wait_for_checkpoint()
    leftovers = 0
    for _ in range(count):
        with _moment(randomness) as reached:
            ranks = fork_ranks(partial(_rank, folder, how, reached, randomness.randrange(2)))
        for child in randomness.sample(ranks, 2):
            os.kill(child, signal.SIGKILL)
            time.sleep(randomness.choice([0.0, 0.005]))
        for child in ranks:
            os.waitpid(child, 0)
        leftovers += bool(job.left_behind())
        step = job.check()
    return {"kills": count, "leftovers": leftovers, "saves": step}


@contextmanager
def _moment(randomness: random.Random) -> Iterator[Callable[[str], None]]:
    """Start a process inside; return when it has called what is given at random often.

    It is killed right there, or is to be killed soon after. Instants are counted in what a save does, not in
    seconds: a busy machine saves late.
    """
    ready, told = os.pipe()
    left, later = randomness.randrange(1, 150), randomness.choice([None, randomness.uniform(0.0, 0.005)])

    def reached(event: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.write(told, b"1")
            if later is None:
                os.kill(os.getpid(), signal.SIGKILL)

    yield reached
    os.close(told)
    assert os.read(ready, 1), "a process ended before its time"
    os.close(ready)
    time.sleep(later or 0.0)


def _rank(folder: str, how: str, reached: Callable[[str], None], counts: int) -> None:
    job = Job(folder, how)
    job.load()
    _save_until_killed(job, reached if job.accelerator.process_index == counts else lambda event: None)


def _save_until_killed(job: Job, reached: Callable[[str], None]) -> None:
    _follow(reached, links=True)
    job.save_for_ever()


def kill_at_each_point(folder: str, how: str, links: bool, fresh: bool) -> dict[str, int]:
    """One save a point: killed right before the n-th thing it does to the file system, for every n."""
    job = Job(folder, how)
    job.save(7)  # which imports what a save needs: an import opens files too
    job.accelerator.wait_for_checkpoint()
    outcomes = {"points": 0, "old": 0, "new": 0, "none": 0}
    for point in range(1, 1000):
        if fresh:
            for place in job.folder.iterdir():
                shutil.rmtree(place)
        else:
            job.save(7)
            job.accelerator.wait_for_checkpoint()
            assert not job.left_behind(), job.left_behind()
        beside = None if fresh or job.numbered else job.target / "notes" / "mine"
        if beside and point == 1:
            beside.parent.mkdir()
            beside.write_text("of the user")
        assert beside is None or beside.read_text() == "of the user"
        child = fork(lambda point=point: _die_at(job, point, links=links))
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return outcomes
        outcomes["points"] += 1
        if fresh and not job.exists():
            outcomes["none"] += 1
            continue
        step = job.load()
        assert step in (7, 8)
        assert beside is None or (job.target / "notes" / "mine").read_text() == "of the user"
        outcomes["old" if step == 7 else "new"] += 1
    raise AssertionError("a save does more than 1000 things")


def _die_at(job: Job, point: int, *, links: bool) -> None:
    left = point

    def happens(event: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    _follow(happens, links=links)
    job.save(8)
    job.accelerator.wait_for_checkpoint()


def _follow(happens: Callable[[str], None], *, links: bool) -> None:
    """Call `happens` right before each thing that this process does to the file system, from now on.

    links: the file system has them; else a file is created in its place.
    """
    sync = os.fsync

    def watched(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.mkdir", "os.link", "os.rename", "os.rmdir", "os.remove"):
            happens(event)

    def watched_sync(handle: int) -> None:
        happens("fsync")
        sync(handle)

    def refused(*_: object) -> None:
        happens("link")
        raise OSError(errno.EPERM, "Operation not permitted")

    os.fsync = watched_sync
    if not links:
        os.link = refused
    sys.addaudithook(watched)
