"""The trainings of level 3: several processes of one run, each with its view."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, AccelError, DataLoaderConfiguration, LocalSGD
from accel_testing.kit.network import FEATURES, given, network, parts
from accel_testing.kit.tasks import Scenario, learn, make, owns_schedule
from accel_testing.kit.tasks_training import Recipe, Trace, plain, train, weights

__all__ = [
    "apart",
    "coordination",
    "dims",
    "invariance",
    "metrics",
    "nested",
    "quiet_windows",
    "replicas",
    "samples",
    "sequential_runs",
    "simultaneous_runs",
    "uneven_inputs",
    "unshared",
    "whole",
]


def dims(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Every collective of both dimensions that a run always has."""
    accelerator = make(arguments)
    found = {dim: _collectives(accelerator, dim) for dim in ("world", "control")}
    accelerator.end_training()
    return found


def _collectives(accelerator: Accelerator, dim: str) -> dict[str, Any]:
    group = accelerator.run.collectives(dim)
    device = accelerator.device if dim == "world" else torch.device("cpu")

    def mine() -> Tensor:
        return torch.tensor([group.rank + 1.0, 10.0], device=device)

    found: dict[str, Any] = {
        operation: group.all_reduce(mine(), operation).tolist() for operation in ("sum", "mean", "min", "max")
    }
    found["gather"] = group.all_gather(mine()).tolist()
    found["scalars"] = group.all_gather(mine().reshape(1, 2)).shape
    found["broadcast"] = group.broadcast(mine(), source=group.size - 1).tolist()
    found["objects"] = list(group.all_gather_object({"rank": group.rank}))
    found["object"] = group.broadcast_object(f"from {group.rank}", source=0)
    group.barrier()
    torchs = None if group.group is None else torch.distributed.get_world_size(group.group)
    return found | {"rank": group.rank, "size": group.size, "torchs": torchs}


def nested(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facade's collectives over nested structures, of unequal lengths too."""
    accelerator = make(arguments)
    topology, device = accelerator.run.topology, accelerator.device
    reader = topology.reader
    tensors = {
        "a": torch.full((2, 1), float(reader), device=device),
        "b": [torch.tensor([reader], device=device)],
    }
    ragged = torch.full((reader + 1,), reader + 1, device=device)
    gathered = accelerator.gather(tensors)
    padded = accelerator.pad_across_processes(ragged)
    found = {
        "a": gathered["a"].flatten().tolist(),
        "b": gathered["b"][0].tolist(),
        "sum": accelerator.reduce(torch.tensor(reader + 1.0, device=device), "sum").item(),
        "mean": accelerator.reduce({"x": torch.tensor(reader + 1.0, device=device)}, "mean")["x"].item(),
        "padded": accelerator.gather(padded).reshape(-1, topology.readers).tolist(),
        "broadcast": accelerator.broadcast(
            torch.tensor([accelerator.process_index], device=device), accelerator.num_processes - 1
        ).tolist(),
        "scalar": accelerator.gather(torch.tensor(float(reader), device=device)).tolist(),
        "each": topology.losses // topology.readers,
    }
    accelerator.end_training()
    return found


def samples(
    length: int, batch_size: int, shuffle: bool, epochs: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the samples that this process sees: a list of batches per epoch."""
    accelerator = make(arguments)
    generator = torch.Generator().manual_seed(4)
    loader = DataLoader(TensorDataset(torch.arange(length)), batch_size, shuffle=shuffle, generator=generator)
    prepared = accelerator.prepare(loader)
    found = {
        "epochs": [[batch[0].tolist() for batch in prepared] for _ in range(epochs)],
        "length": len(prepared),
        "reader": (accelerator.run.topology.reader, accelerator.run.topology.readers),
    }
    accelerator.end_training()
    return found


def metrics(length: int, batch_size: int, arguments: Mapping[str, Any]) -> list[int]:
    """Every sample as `gather_for_metrics` gives it over one epoch."""
    accelerator = make(arguments)
    prepared = accelerator.prepare(DataLoader(TensorDataset(torch.arange(length)), batch_size))
    seen: list[int] = []
    for (batch,) in prepared:
        seen.extend(accelerator.gather_for_metrics({"ids": batch})["ids"].tolist())
    accelerator.end_training()
    return seen


def invariance(recipe: Recipe, arguments: Mapping[str, Any]) -> Trace:
    """Train, and trace the losses of this process's own micro-batches."""
    accelerator = make(arguments, gradient_accumulation_steps=recipe.accumulation)
    trace = train(recipe, accelerator)
    accelerator.end_training()
    return trace


def by_hand(recipe: Recipe, shared: Mapping[str, str], arguments: Mapping[str, Any]) -> Trace:
    """Train the same as a plain loop, in one process. shared: options to keep."""
    left_out = {"strategy": None, "plugins": None}
    scenario = Scenario(
        "by hand", left_out, 1, shared
    )  # options of plugins that are not in the run are refused
    with scenario.entered():
        accelerator = make(scenario.arguments(arguments))
    trace = plain(recipe, accelerator.device, accelerator.mixed_precision)
    accelerator.end_training()
    return trace


def replicas(arguments: Mapping[str, Any]) -> list[float]:
    """Weights after training that each process began with weights of its own."""
    accelerator = make(arguments)
    model = given.network(seed=accelerator.process_index)
    batches = DataLoader(given.dataset(16), batch_size=2)
    model, optimizer, batches = accelerator.prepare(model, given.optimizer(model.parameters(), 0.1), batches)
    for _ in learn(accelerator, model, batches, given.forward_loss):
        optimizer.step()
        optimizer.zero_grad()
    found = weights(model, accelerator)
    accelerator.end_training()
    return found


def whole(arguments: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return the weights this process holds, and those of the model."""
    accelerator = make(arguments)
    model = given.network()
    expected = weights(model)
    model, _ = accelerator.prepare(model, given.optimizer(model.parameters(), 0.1))
    found = weights(accelerator.unwrap_model(model))
    accelerator.end_training()
    return found, expected


def own_buffers(arguments: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """Export a model whose buffers differ by rank: their values and dtypes."""
    accelerator = make(arguments, mixed_precision="no")
    model = network()
    model.register_buffer("scale", torch.tensor(3.0))
    model.register_buffer("count", torch.tensor(1001))
    model, _ = accelerator.prepare(model, given.optimizer(model.parameters(), 0.1))
    for name, buffer in accelerator.unwrap_model(model).named_buffers():
        if name.rpartition(".")[2] in ("scale", "count"):
            buffer.add_(30 * accelerator.process_index)
    state = accelerator.get_state_dict(model, rank0_only=False)
    found = {name: (state[name].item(), str(state[name].dtype)) for name in ("scale", "count")}
    accelerator.end_training()
    return found


def quiet_windows(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Gradients in and after a window of two and in `no_sync`, and collectives.

    `seen`: the first parameter's gradient in each backward, as a tensor hook sees it.
    """
    accelerator = make(arguments, gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    seen: list[list[float]] = []
    first = next(accelerator.unwrap_model(model).parameters())
    first.register_hook(lambda gradient: seen.append(gradient.float().cpu().flatten().tolist()))
    x = torch.full((2, FEATURES), accelerator.run.topology.reader + 1.0, device=accelerator.device)
    y = torch.zeros(2, dtype=torch.int64, device=accelerator.device)
    gradients, counts = [], []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x).float(), y))
            optimizer.step()
            gradients.append(_gradients(accelerator.unwrap_model(model)))
            counts.append(_reductions())
            optimizer.zero_grad()
    with accelerator.no_sync(model):
        accelerator.backward(cross_entropy(model(x).float(), y))
    counts.append(_reductions())
    gradients.append(_gradients(accelerator.unwrap_model(model)))
    accelerator.end_training()
    reader = accelerator.run.topology.reader
    return {"reader": reader, "gradients": gradients, "reductions": counts, "seen": seen}


def _gradients(model: nn.Module) -> list[float]:
    return [
        value
        for p in model.parameters()
        if p.grad is not None
        for value in p.grad.float().cpu().flatten().tolist()
    ]


def _reductions() -> int | None:
    """Count this process's reductions, which only the simulated device can do."""
    from accel_testing.simulated.group import COLLECTIVES

    reductions = [count for name, count in COLLECTIVES.items() if "reduce" in name]
    return sum(reductions) if COLLECTIVES else None


def apart(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run `LocalSGD` on weights set to the reader: before and after averaging."""
    accelerator = make(arguments)
    reader = accelerator.run.topology.reader
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((2, FEATURES), reader + 1.0, device=accelerator.device)
    y = torch.zeros(2, dtype=torch.int64, device=accelerator.device)
    found: dict[str, Any] = {"reader": reader}
    with LocalSGD(accelerator, model, 2) as local:
        accelerator.backward(cross_entropy(model(x).float(), y))
        optimizer.step()
        local.step()
        found["stepped"] = weights(accelerator.unwrap_model(model))
        with torch.no_grad():
            for parameter in accelerator.unwrap_model(model).parameters():
                parameter.fill_(reader)
        found["before"] = weights(accelerator.unwrap_model(model))[0]
        local.step()
        found["after"] = weights(accelerator.unwrap_model(model))
    accelerator.end_training()
    return found


def uneven_inputs(arguments: Mapping[str, Any]) -> list[float]:
    """Weights after rank r has trained on r + 2 batches."""
    accelerator = make(arguments)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, FEATURES, device=accelerator.device)
    y = torch.zeros(2, dtype=torch.int64, device=accelerator.device)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for _ in range(accelerator.process_index + 2):
            accelerator.backward(cross_entropy(model(x).float(), y))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    found = weights(model, accelerator)
    accelerator.end_training()
    return found


def unshared(arguments: Mapping[str, Any]) -> list[str]:
    """Train and evaluate on a batch that only reader 0 has, and return the errors."""
    accelerator = make(arguments, dataloader_config=DataLoaderConfiguration(even_batches=False))
    count = accelerator.run.topology.readers + 1
    model = given.network()
    loader = DataLoader(given.dataset(2 * count), batch_size=2)
    model, _, loader = accelerator.prepare(model, given.optimizer(model.parameters(), 0.1), loader)
    found = []
    for training in (False, True):
        told = ""
        try:
            for batch in loader:
                _forward(accelerator, model, batch, training)
        except AccelError as error:
            told = str(error)
        found.append(told)
    accelerator.end_training()
    return found


def _forward(accelerator: Accelerator, model: nn.Module, batch: Any, training: bool) -> None:
    if owns_schedule(accelerator):
        pieces = parts([batch])
        accelerator.forward_backward(
            model, pieces, given.forward_loss, microbatches=len(pieces), forward_only=not training
        )
        return
    with torch.set_grad_enabled(training):
        loss, _ = given.forward_loss(model, batch)
    if training:
        accelerator.backward(loss)


def coordination(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Triggers, turns, shares and the main process."""
    accelerator = make(arguments)
    rank, size = accelerator.process_index, accelerator.num_processes
    untouched = accelerator.check_trigger()
    if rank == size - 1:
        accelerator.set_trigger()
    triggered, again = accelerator.check_trigger(), accelerator.check_trigger()
    with accelerator.main_process_first():
        entered = time.monotonic()
    with accelerator.split_between_processes(list(range(5))) as share:
        mine = list(share)
    found = {
        "triggers": (untouched, triggered, again),
        "entered": entered,
        "share": (accelerator.run.topology.reader, mine),
        "main": accelerator.is_main_process,
        "last": accelerator.is_last_process,
        "only": accelerator.on_main_process(lambda: rank)(),
    }
    accelerator.end_training()
    return found


def sequential_runs(arguments: Mapping[str, Any]) -> list[list[float]]:
    """Losses of three runs in one process; the last two have the same recipe."""
    losses = []
    for accumulation in (1, 2, 2):
        accelerator = make(arguments, gradient_accumulation_steps=accumulation)
        losses.append(train(Recipe(accumulation=accumulation, epochs=1), accelerator).losses)
        accelerator.end_training()
    return losses


def simultaneous_runs(arguments: Mapping[str, Any]) -> dict[str, list[float]]:
    """Losses of two runs that live side by side, and of each alone."""
    first, second = Recipe(epochs=1), Recipe(accumulation=2, epochs=1)
    one = make(arguments)
    two = make(arguments, gradient_accumulation_steps=2)
    found = {"one": train(first, one).losses, "two": train(second, two).losses}
    one.end_training()
    found["two, after one has ended"] = train(second, two).losses
    two.end_training()
    alone = make(arguments, gradient_accumulation_steps=2)
    found["two, alone"] = train(second, alone).losses
    alone.end_training()
    return found
