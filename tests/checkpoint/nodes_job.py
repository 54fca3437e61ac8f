"""What each rank of test_checkpoint_nodes does: two nodes of which each sees a folder of its own."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import torch
from torch import nn

from accel_core import Accelerator, Leaf, OptimizerState, ProjectConfiguration


def on_a_node_of_its_own(folder: str, per_node: int, shared: bool = False) -> None:
    """Make this rank one of a node with `per_node` ranks: its variables, and the folder it is in."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ |= {"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    os.environ |= {"GROUP_RANK": str(rank // per_node), "GROUP_WORLD_SIZE": str(world // per_node)}
    disk = Path(folder) / ("shared" if shared else f"node{rank // per_node}")
    disk.mkdir(exist_ok=True)
    os.chdir(disk)


class Job:
    def __init__(self, rows: bool = False, **options: object) -> None:
        options.setdefault("automatic_checkpoint_naming", True)
        options.setdefault("save_on_each_node", True)
        config = ProjectConfiguration(project_dir=".", **options)
        torch.manual_seed(0)
        self.accelerator = Accelerator(device="cpu", project_config=config)
        self.module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.inner = torch.optim.AdamW(self.module.parameters())
        self.model, self.optimizer = self.accelerator.prepare(self.module, self.inner)
        self.unit = self.accelerator.run.units[0]
        self.logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.logged.append(record.getMessage())
        logging.getLogger("accel_core").addHandler(handler)
        if rows:
            self._shard()

    def train(self) -> None:
        torch.manual_seed(5)
        self.accelerator.backward(self.model(torch.rand(4, 8)).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set(self, value: float) -> None:
        for tensor in self.tensors():
            tensor.fill_(value)

    def tensors(self) -> list[torch.Tensor]:
        """What this rank offers, as a strategy does that shards."""
        model = self.unit.hooks.model_state(self.unit).values()
        moments = self.unit.hooks.optimizer_state(self.unit, self.inner).leaves.values()
        return [tensor for leaf in (*model, *moments) for _, tensor in leaf.shards]

    def value(self) -> float | set[float]:
        found = {number for tensor in self.tensors() for number in tensor.flatten().tolist()}
        return found.pop() if len(found) == 1 else found

    def _shard(self) -> None:
        hooks, world = self.unit.hooks, self.accelerator.run.world
        model_state, optimizer_state = hooks.model_state, hooks.optimizer_state

        def cut(leaf: Leaf) -> Leaf:
            if not leaf.global_shape:
                return leaf
            first, last = (8 * rank // world.size for rank in (world.rank, world.rank + 1))
            offset = (first, *(0 for _ in leaf.global_shape[1:]))
            shards = ((offset, leaf.shards[0][1][first:last]),)
            return Leaf(kind=leaf.kind, global_shape=leaf.global_shape, shards=shards)

        def of_optimizer(unit, optimizer):
            state = optimizer_state(unit, optimizer)
            leaves = {name: cut(leaf) for name, leaf in state.leaves.items()}
            return OptimizerState(leaves=leaves, plain=state.plain, groups=state.groups)

        hooks.model_state = lambda unit: {name: cut(leaf) for name, leaf in model_state(unit).items()}
        hooks.optimizer_state = of_optimizer


def save(folder: str, per_node: int, values: list[float], options: dict) -> list[str]:
    """What is on this rank's disk after these saves."""
    where, name, rows = (options.pop(key, None) for key in ("shared", "name", "rows"))
    on_a_node_of_its_own(folder, per_node, bool(where))
    job = Job(rows=bool(rows), **options)
    job.train()
    for value in values:
        job.set(value)
        job.accelerator.save_state(name)
    job.accelerator.end_training()
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def load(folder: str, per_node: int, options: dict) -> tuple[object, str]:
    """What is loaded, or the error; and what was logged."""
    where, name, rows = (options.pop(key, None) for key in ("shared", "name", "rows"))
    missing_ok = bool(options.pop("missing_ok", False))
    on_a_node_of_its_own(folder, per_node, bool(where))
    job = Job(rows=bool(rows), **options)
    job.train()
    job.set(-1)
    try:
        job.accelerator.load_state(name, missing_ok=missing_ok)
        found: object = job.value()
    except Exception as error:
        assert job.value() == -1
        found = f"{type(error).__name__}: {error}"
    job.accelerator.wait_for_everyone()
    job.accelerator.end_training()
    return found, "\n".join(job.logged)


def save_and_fail_on_node_1(
    folder: str, per_node: int, what: str, name: str | None
) -> tuple[str, float, list[str], float]:
    """A save that fails on the second disk; what is said, what is loaded then, and after one that works."""
    on_a_node_of_its_own(folder, per_node)
    from accel_core.storage import commit, pending

    job = Job(total_limit=1)
    job.train()
    job.set(1)
    job.accelerator.save_state(name)
    module = {"manifest_of": commit, "commit": pending}[what]
    real = getattr(module, what)

    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if job.accelerator.run.world.node_rank == 1:
        setattr(module, what, fails)
    job.set(2)
    try:
        job.accelerator.save_state(name)
        said = "saved"
    except Exception as error:
        said = str(error)
    setattr(module, what, real)
    job.accelerator.load_state(name)
    loaded = job.value()
    job.set(3)
    job.accelerator.save_state(name)
    job.accelerator.wait_for_everyone()
    left = sorted(path.name for path in (Path() if name else Path("checkpoints")).iterdir())
    job.accelerator.load_state(name)
    found = said, loaded, left, job.value()
    job.accelerator.end_training()
    return found


def save_and_die(folder: str, node: int, point: str, name: str | None) -> None:
    """A save of 1 that all finish, if there is none yet, and one of 2 during which one node is killed."""
    on_a_node_of_its_own(folder, 1)
    from accel_core.storage import pending
    from accel_core.storage.disk import Disk

    job = Job(total_limit=1)
    job.train()
    if not job.accelerator.load_state(name, missing_ok=True):
        job.set(1)
        job.accelerator.save_state(name)
    when, what = point.split()
    owner = {"claim": Disk, "write": pending.Share}.get(what, pending)
    real = getattr(owner, what)

    def dies(*arguments: object, **options: object) -> None:
        if when == "after":
            real(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    if job.accelerator.run.world.node_rank == node:
        setattr(owner, what, dies)
    job.set(2)
    job.accelerator.save_state(name)


def go_on(folder: str, name: str | None) -> tuple[float, float, list[str]]:
    """What is loaded, what after another save, and what is there then."""
    on_a_node_of_its_own(folder, 1)
    job = Job(total_limit=1)
    job.train()
    job.accelerator.load_state(name)
    first = job.value()
    job.set(3)
    job.accelerator.save_state(name)
    job.accelerator.load_state(name)
    job.accelerator.wait_for_everyone()
    left = sorted(path.name for path in (Path() if name else Path("checkpoints")).iterdir())
    job.accelerator.end_training()
    return first, job.value(), left
