"""What each rank of test_checkpoint_sharded does: one training, its state held in several ways.

All ranks compute the same batches, so that one arithmetic serves all: losses can be compared.
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import evolve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from accel_core import Accelerator, OptimizerState, flat_range, hooks, implements, leaf_of

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.01),
}


class Whole:
    """Every rank has everything, and does the same."""

    def __init__(self, config, run) -> None:
        self.run = run


class Shards(Whole):
    """torch's fully_shard, and not a line about state."""

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        fully_shard(model.first)
        return fully_shard(model)


class Tensor(Whole):
    """Some weights are DTensors, by columns, rows, or copies, and not a line about state."""

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        mesh = init_device_mesh("cpu", (self.run.world.size,))
        for name, placement in (("first", Shard(1)), ("last", Shard(0)), ("frozen", Replicate())):
            layer = getattr(model, name)
            data = distribute_tensor(layer.weight.detach(), mesh, [placement])
            layer.weight = nn.Parameter(data, requires_grad=layer.weight.requires_grad)
        return model


class Flat(Whole):
    """An engine: each rank steps its range of all parameters, laid end to end, in masters of its own.

    The masters are the weights that are saved; the model's own are derived from them.
    """

    below: object

    @implements(hooks.wrap_optimizer)
    def wrap_optimizer(self, unit, optimizer):
        names = {parameter: name for name, parameter in unit.named_parameters().items()}
        self.held = {names[p]: p for group in optimizer.param_groups for p in group["params"]}
        rank, ranks = self.run.world.rank, self.run.world.size
        total = sum(p.numel() for p in self.held.values())
        self.first, self.end = total * rank // ranks, total * (rank + 1) // ranks
        flat = torch.cat([p.detach().flatten() for p in self.held.values()])
        self.master = flat[self.first : self.end].clone()
        self.momentum, self.calls = None, 0
        return optimizer

    def cut(self, data):
        """Parameter name -> leaf of this rank's elements of it, which `data` holds end to end."""
        at, leaves = 0, {}
        for name, parameter in self.held.items():
            first, end = max(at, self.first), min(at + parameter.numel(), self.end)
            mine = data[first - self.first : max(first, end) - self.first]
            leaves[name] = flat_range(mine, parameter.shape, first - at)
            at += parameter.numel()
        return leaves

    @implements(hooks.model_state)
    def model_state(self, unit):
        return {**self.below.model_state(unit), **self.cut(self.master)}

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit, optimizer):
        leaves = {} if self.momentum is None else self.cut(self.momentum)
        return OptimizerState(
            leaves={f"{name}/momentum_buffer": leaf for name, leaf in leaves.items()},
            plain={name: {"calls": self.calls} for name in self.held if self.calls},
            groups=self.below.optimizer_state(unit, optimizer).groups,
            algorithm="SGD",
        )

    @implements(hooks.materialize_optimizer_state)
    def materialize(self, unit, optimizer, template, plain):
        self.momentum = torch.empty_like(self.master) if template else None
        self.calls = max((values.get("calls", 0) for values in plain.values()), default=0)

    @implements(hooks.load_state)
    def load_state(self, unit):
        """The model's own weights, from all ranks' masters."""
        parts = self.run.collectives("control").all_gather_object(self.master)
        whole = torch.cat(list(parts)).split([p.numel() for p in self.held.values()])
        for parameter, data in zip(self.held.values(), whole, strict=True):
            parameter.data.copy_(data.view(parameter.shape))

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit, optimizer, closure):
        gradient = torch.cat([p.grad.flatten() for p in self.held.values()])[self.first : self.end]
        self.momentum = gradient if self.momentum is None else self.momentum * 0.9 + gradient
        self.master -= optimizer.param_groups[0]["lr"] * self.momentum
        self.calls += 1
        self.load_state(unit)
        return True


class Stages(Whole):
    """As in a pipeline: each rank holds and steps every n-th parameter; the others' are derived."""

    below: object

    def mine(self, number):
        return number % self.run.world.size == self.run.world.rank

    @implements(hooks.wrap_optimizer)
    def wrap_optimizer(self, unit, optimizer):
        for group in optimizer.param_groups:
            group["params"] = [p for number, p in enumerate(group["params"]) if self.mine(number)]
        return optimizer

    @implements(hooks.model_state)
    def model_state(self, unit):
        leaves = dict(self.below.model_state(unit))
        trained = [name for name, p in unit.named_parameters().items() if p.requires_grad]
        for number, name in enumerate(trained):
            shards = leaves[name].shards if self.mine(number) else ()
            leaves[name] = evolve(leaves[name], shards=shards, replicated=False)
        return leaves

    @implements(hooks.load_state)
    def load_state(self, unit):
        trained = [p for p in unit.named_parameters().values() if p.requires_grad]
        for number, parameter in enumerate(trained):
            self.run.collectives("control").broadcast(parameter.data, number % self.run.world.size)

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit, optimizer, closure):
        self.below.optimizer_step(unit, optimizer, closure)
        self.load_state(unit)
        return True


class Network(nn.Module):
    """Shared and frozen layers, a buffer, and sizes that no number of ranks divides."""

    def __init__(self, matrices: bool) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5, bias=False)
        self.norm = nn.LayerNorm(5, elementwise_affine=not matrices)
        self.frozen = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.last = nn.Linear(5, 7, bias=False)
        self.again = self.norm
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.last(self.again(self.frozen(self.norm(self.first(x)))))


class Job:
    """A prepared run whose state is held in the way that the strategy `how` does."""

    def __init__(self, how: str, optimizer: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.accelerator = Accelerator(device="cpu", strategy=how)
        module = Network(matrices=optimizer == "Muon")
        trained = [p for p in module.parameters() if p.requires_grad]
        self.model, self.optimizer = self.accelerator.prepare(module, OPTIMIZERS[optimizer](trained))
        self.computes_whole = how != "tensor"

    def step(self, number: int) -> float:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(number))
        loss = (self.forward(x) - x).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.computes_whole:
            return self.model(x)
        named = self.model.named_parameters()
        weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in named}
        return torch.func.functional_call(self.model, weights, x)


def begin(folder: str, optimizer: str, ways: list[str]) -> dict[str, list[float]]:
    """For each way: three steps, a checkpoint, and what follows: the next losses, and what was seen."""
    return {how: _go(Path(folder), how, optimizer, saved=None) for how in ways}


def go_on(
    folder: str, optimizer: str, ways: list[str], saved: list[str]
) -> dict[tuple[str, str], list[float]]:
    """(checkpoint, way) -> what follows, in a program that began otherwise."""
    return {(each, how): _go(Path(folder), how, optimizer, saved=each) for each in saved for how in ways}


def _go(folder: Path, how: str, optimizer: str, saved: str | None) -> list[float]:
    job = Job(how, optimizer, seed=0 if saved is None else 1)
    if saved is None:
        for number in range(3):
            job.step(number)
        job.accelerator.save_state(folder / f"{how}-{job.accelerator.num_processes}")
    else:
        job.accelerator.load_state(folder / saved)
    losses = [job.step(number) for number in range(3, 6)]
    seen = job.accelerator.unwrap_model(job.model).seen.item()
    job.accelerator.end_training()
    return [*losses, seen]


def two_dimensions() -> list[bool]:
    """Boxes of DTensors over a mesh of two dimensions, by the leaves' own word and by torch's."""
    accelerator = Accelerator(device="cpu", strategy="whole")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole, found = torch.arange(35.0).view(7, 5), []
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
        leaf = leaf_of(distribute_tensor(whole, mesh, placements))
        for offset, part in leaf.shards:
            box = tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
            found.append(torch.equal(whole[box], part))
        found.append(leaf.replicated == (placements[0] == Replicate()))
    accelerator.end_training()
    return found
