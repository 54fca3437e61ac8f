"""What each rank of test_checkpoint_ranks does. Returns plain values, which the test compares."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, CheckpointError, Entry, Leaf, OptimizerState
from accel_core.contract.bound import Implementation
from accel_core.storage import pending


class Job:
    """A small prepared run; `seed` makes its start differ from the checkpoint's."""

    def __init__(self, seed: int = 0, batch: int = 4, norm: type[nn.Module] = nn.LayerNorm) -> None:
        torch.manual_seed(seed)
        self.accelerator = Accelerator(device="cpu")
        self.module = nn.Sequential(nn.Linear(8, 6), norm(6), nn.Linear(6, 4))
        self.inner = torch.optim.AdamW(self.module.parameters(), lr=0.01 * (seed + 1))
        data = TensorDataset(torch.arange(64 * 8).float().view(64, 8) / 512)
        loader = DataLoader(
            data, batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.module, self.inner, loader)
        self.run = self.accelerator.run
        self.unit = self.run.units[0]

    def train(self, steps: int) -> None:
        for _, (inputs,) in zip(range(steps), self.loader, strict=False):
            self.accelerator.backward(self.model(inputs).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> list[list[float]]:
        parameters = self.module.parameters()
        moments = [
            self.inner.state[p][key] for p in parameters for key in sorted(self.inner.state.get(p, {}))
        ]
        return [tensor.flatten().tolist() for tensor in (*self.module.state_dict().values(), *moments)]

    # -- ways to hold state ----------------------------------------------------------------------

    def shard_rows(self) -> None:
        """Offer rows only, as a strategy does that shards: rank r of n has every n-th part."""
        hooks, rank, ranks = self.unit.hooks, self.run.world.rank, self.run.world.size
        model_state, optimizer_state = hooks.model_state, hooks.optimizer_state

        def cut(leaf: Leaf) -> Leaf:
            if not leaf.global_shape:
                return leaf
            rows = leaf.global_shape[0]
            first, last = rows * rank // ranks, rows * (rank + 1) // ranks
            offset = (first, *(0 for _ in leaf.global_shape[1:]))
            return Leaf(
                kind=leaf.kind,
                global_shape=leaf.global_shape,
                shards=((offset, leaf.shards[0][1][first:last]),),
            )

        def of_optimizer(unit, optimizer):
            state = optimizer_state(unit, optimizer)
            return OptimizerState(
                leaves={k: cut(v) for k, v in state.leaves.items()}, plain=state.plain, groups=state.groups
            )

        hooks.model_state = lambda unit: {name: cut(leaf) for name, leaf in model_state(unit).items()}
        hooks.optimizer_state = of_optimizer

    def plugin(self, taken: dict) -> None:
        """A plugin with an entry of each scope, and one that no other rank has."""
        rank, reader = self.run.world.rank, self.run.topology.reader
        tensor = torch.full((3,), float(rank))
        leaf = Leaf(kind="opaque", global_shape=(3,), shards=(((0,), tensor),), layout="mine")

        def give(unit):
            return {
                "all": Entry(value={"scale": 2.0}),
                f"stage {rank}": Entry(value=rank),
                "reader": Entry(value=("reader", reader), scope="per_reader"),
                "rank": Entry(value=("rank", rank), scope="per_rank"),
                "tensor": Entry(value=leaf, scope="per_rank"),
            }

        def take(unit, entries):
            values = {name: entry.value for name, entry in entries.items()}
            if "tensor" in values:
                values["tensor"] = values["tensor"].shards[0][1].tolist()
            taken.update(values)

        hooks, found = self.unit.hooks, {"save_state": give, "load_state": take}
        others = hooks.implementations
        hooks.implementations = lambda hook: (
            [Implementation("mine", found[hook])] if hook in found else others(hook)
        )


def prepared(how: str, seed: int = 0) -> Job:
    if how == "batch norm":
        return Job(seed, norm=nn.BatchNorm1d)
    job = Job(seed)
    if how == "rows":
        job.shard_rows()
    return job


def save_it(folder: str, how: str = "whole") -> list[list[float]]:
    job = prepared(how)
    job.train(3)
    job.run.checkpoints.save(Path(folder) / "here")
    state = job.state()
    job.accelerator.end_training()
    return state


def load_it(folder: str, how: str = "whole") -> tuple[list[list[float]], float]:
    job = prepared(how, seed=1)
    job.run.checkpoints.load(Path(folder) / "here")
    found = job.state(), job.inner.param_groups[0]["lr"]
    job.accelerator.end_training()
    return found


def data_goes_on(folder: str, batch: int, resume: bool) -> list[int]:
    """The samples of this rank after the save, which is made when the epoch is 16 samples old."""
    job = Job(batch=batch)
    if resume:
        job.run.checkpoints.load(Path(folder) / "here")
    seen: list[int] = []
    for number, (inputs,) in enumerate(job.loader, 1):
        seen += (inputs[:, 0] * 64).int().tolist()
        if not resume and number * batch * job.run.world.size == 16:
            job.run.checkpoints.save(Path(folder) / "here")
            seen.clear()
    job.accelerator.end_training()
    return seen


def random_after_load(folder: str, resume: bool) -> tuple[list[float], str]:
    job = Job()
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("accel_core").addHandler(handler)
    if resume:
        job.run.checkpoints.load(Path(folder) / "here")
    else:
        torch.manual_seed(100 + job.run.world.rank)
        job.run.checkpoints.save(Path(folder) / "here")
    drawn = torch.rand(4).tolist()
    job.accelerator.end_training()
    return drawn, "\n".join(logged)


def plugin_entries(folder: str, resume: bool) -> dict:
    job, taken = Job(), {}
    job.plugin(taken)
    if resume:
        job.run.checkpoints.load(Path(folder) / "here")
    else:
        job.run.checkpoints.save(Path(folder) / "here")
    job.accelerator.end_training()
    return taken


def saved_by_rank_1_alone(folder: str) -> list[list[float]]:
    job = Job()
    job.plugin({})
    job.train(2)
    if job.run.world.rank == 1:
        job.accelerator.save_state(f"{folder}/here", alone=True)
    state = job.state()
    job.accelerator.end_training()
    return state


def loaded_with_plugin(folder: str) -> tuple[list[list[float]], dict]:
    job, taken = Job(seed=1), {}
    job.plugin(taken)
    job.accelerator.load_state(f"{folder}/here")
    state = job.state()
    job.accelerator.end_training()
    return state, taken


def message_of(folder: str, trouble: str) -> tuple[str, list[str]]:
    """What a save says after this trouble on rank 1, and what is on the disk then."""
    job, here = Job(), Path(folder)
    job.run.checkpoints.save(here / "here")
    target = here / "here"
    if job.run.world.rank == 1:
        if trouble == "disk full":

            def full(*_):
                raise OSError(errno.ENOSPC, "No space left on device")

            pending.write_file = full
        elif trouble == "window":
            job.unit.window.boundary = False
        elif trouble == "folder":
            target = here / "another"
        elif trouble == "sharded differently":
            job.shard_rows()
    if trouble == "registered":
        job.accelerator.register_for_checkpointing(Lambda(job.run.world.rank))
    try:
        job.run.checkpoints.save(target)
        said = "saved"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    job.accelerator.wait_for_everyone()
    job.run.registered.clear()
    job.run.checkpoints.load(here / "here")
    left = sorted(path.name for path in here.iterdir())
    job.accelerator.end_training()
    return said, left


class Lambda:
    """State that cannot be stored, on rank 1."""

    def __init__(self, rank: int) -> None:
        self.state = {"f": print} if rank == 1 else {}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        pass


def load_damaged(folder: str) -> str:
    job = Job(seed=1)
    before = job.state()
    try:
        job.run.checkpoints.load(Path(folder) / "here")
    except Exception as error:
        assert job.state() == before
        return str(error)
    finally:
        job.accelerator.end_training()
    return "loaded"


def save_alone(folder: str, ways: str = "whole") -> tuple[list[list[float]], str]:
    """Rank 0 saves by itself; then all load. The state that this rank has then, and what rank 0 raised."""
    job, said = Job(), ""
    if ways == "rows":
        job.shard_rows()
    job.train(2)
    saved = job.state()
    if job.run.world.rank == 0:
        try:
            job.accelerator.save_state(f"{folder}/here", alone=True)
        except CheckpointError as error:
            said = str(error)
    job.train(2)  # with reductions that the other rank waits in: it has not called save_state
    if ways == "rows":
        return [], said
    assert job.state() != saved
    job.accelerator.wait_for_everyone()
    job.accelerator.load_state(f"{folder}/here")
    assert job.state() == saved
    return job.state(), said


class Sum:
    """A registered object with a value per rank."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


class Alike(Sum):
    """A sum that is the same on all ranks."""


def save_sums(folder: str) -> list[str]:
    """Register a sum that is alike and one that is not; save twice, and return what was logged."""
    job, said = Job(), list[str]()
    rank = job.run.world.rank
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel_core").addHandler(handler)
    job.accelerator.register_for_checkpointing(Alike(1.0), Sum(float(rank)))
    for _ in range(2):
        job.accelerator.save_state(f"{folder}/here")
    job.accelerator.end_training()
    return said
