"""The trainings of awkward models, in processes and in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from accel_core import Accelerator, AccelError, open_checkpoint, storage_at, stored_weights
from accel_testing.kit.awkward import awkward, awkward_optimizer
from accel_testing.kit.compare import assert_near
from accel_testing.kit.network import dataset, forward_loss
from accel_testing.kit.tasks import Scenario, cut, learn, make

__all__ = [
    "assert_equal",
    "assert_moments",
    "assert_trained",
    "by_hand",
    "exported",
    "keys_of",
    "loaded",
    "parts_by_rank",
    "saved",
    "trained",
]

GLOBAL_BATCH, STEPS = 8, 4
Told = dict[str, Any] | str
"""A result, or the error that refused a feature."""


def _refusals(task: Callable[..., Any], *args: Any) -> Told:
    try:
        found: dict[str, Any] = task(*args)
    except AccelError as error:
        return str(error)
    return found


def trained(without: Collection[str], arguments: Mapping[str, Any]) -> Told:
    """Return the parameters after training, or how the model was refused."""
    return _refusals(_trained, without, arguments, 0.0, None)


def saved(folder: str, without: Collection[str], arguments: Mapping[str, Any]) -> Told:
    """`state_dict()` of the model that was trained, and saved in `folder`."""
    return _refusals(_trained, without, arguments, 0.9, folder)


def _trained(
    without: Collection[str], arguments: Mapping[str, Any], momentum: float, folder: str | None
) -> dict[str, Any]:
    accelerator, model, optimizer, batches = _prepared(without, arguments, 0, momentum)
    for _ in learn(accelerator, model, batches, forward_loss):
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        accelerator.save_state(folder)
    found = _whole(model, accelerator)
    accelerator.end_training()
    return found


@frozen
class Plain:
    """The end of the plain loop: parameters, names of state, optimizer state."""

    parameters: dict[str, Tensor]
    names: list[str]
    optimizer: dict[str, Any]


def by_hand(momentum: float, without: Collection[str], _arguments: Mapping[str, Any]) -> Plain:
    """Return the same training as a plain loop over global batches."""
    model = awkward(without)
    optimizer = awkward_optimizer(model, momentum)
    for batch in DataLoader(dataset(STEPS * GLOBAL_BATCH), GLOBAL_BATCH):
        forward_loss(model, batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return Plain(_here(dict(model.named_parameters())), [*model.state_dict()], _here(optimizer.state_dict()))


def loaded(
    scenario: Scenario, folder: str, again: str | None, without: Collection[str], arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a checkpoint in a scenario, save it again, and return its state."""
    with scenario.entered():
        accelerator, model, optimizer, _ = _prepared(without, scenario.arguments(arguments), 1, 0.9)
        accelerator.load_state(folder)
        if again is not None:
            accelerator.save_state(again)
        found = _whole(model, accelerator), _here(optimizer.state_dict())
        accelerator.end_training()
    return found


def _prepared(
    without: Collection[str], arguments: Mapping[str, Any], seed: int, momentum: float
) -> tuple[Accelerator, nn.Module, Any, Any]:
    accelerator = make(arguments, mixed_precision="no")
    model, size = awkward(without, seed), GLOBAL_BATCH // accelerator.run.topology.readers
    batches: DataLoader[Any] = DataLoader(dataset(STEPS * GLOBAL_BATCH), size)
    optimizer = awkward_optimizer(model, momentum)
    return (accelerator, *accelerator.prepare(model, optimizer, batches))


def _whole(model: nn.Module, accelerator: Accelerator) -> dict[str, Any]:
    cut()
    return _here(accelerator.get_state_dict(model, rank0_only=False))


def _here(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy state for the check's process; None stands for state of other ranks."""
    found: dict[str, Any] = tree_map_only(
        Tensor, lambda tensor: None if tensor.is_meta else tensor.detach().cpu().clone(), dict(state)
    )
    return found


def exported(folder: str, _arguments: Mapping[str, Any]) -> list[str]:
    """Names of a checkpoint's model as `state_dict()` has them, read from its files."""
    names = [name for names, _ in stored_weights(folder) for name in names]
    with open_checkpoint(storage_at(folder)) as checkpoint:
        return names + [key for unit in checkpoint.state["units"].values() for key in unit["extra"]]


def keys_of(optimizer: Mapping[str, Any]) -> dict[int, list[str]]:
    """List the names of an optimizer's state, per parameter."""
    return {number: sorted(state) for number, state in optimizer["state"].items()}


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare two states of a model bit for bit, with what is not a tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
        assert same, f"{name} is {found[name]}, and {value} was saved"


def assert_moments(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Assert that the momentum of each parameter is that of the plain loop."""
    for number, state in expected["state"].items():
        mine, plain = found["state"][number]["momentum_buffer"], state["momentum_buffer"]
        assert mine.shape == plain.shape
        assert_near(f"momentum of parameter {number}", mine.flatten().tolist(), plain.flatten().tolist())


def assert_trained(found: Sequence[Mapping[str, Tensor]], parameters: Mapping[str, Tensor]) -> None:
    """Compare each rank's parameters with those of the plain loop."""
    for ours in found:
        for name, expected in parameters.items():
            assert_near(name, ours[name].flatten().tolist(), expected.flatten().tolist())


# -- parameters that not every rank uses -----------------------------------------------------------


class Parts(nn.Module):
    """A body, a head per batch, and experts that rows choose, of equal sizes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.body, self.gate = nn.Linear(6, 4), nn.Linear(4, 3)
        self.heads, self.experts = (nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for _ in range(2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)

    def forward(self, x: Tensor, head: int) -> Tensor:
        hidden = torch.tanh(self.body(x))
        weights, chosen = self.gate(hidden).softmax(-1).max(-1)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(hidden[rows]) * weights[rows, None])
        output: Tensor = self.heads[head](torch.tanh(out))
        return output


def parts_by_rank(arguments: Mapping[str, Any]) -> tuple[dict[str, Tensor] | str, dict[str, Tensor]]:
    """Train with head r on rank r, and in one loop over all rows."""
    accelerator = make(arguments, mixed_precision="no")
    topology, device, model = accelerator.run.topology, accelerator.device, Parts()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    found: dict[str, Tensor] | str
    try:
        for step, (x, y) in enumerate(_steps(topology.readers)):
            loss = _part_loss(model, x.to(device), y.to(device), topology.reader, step)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found = _whole(model, accelerator)
    except AccelError as error:
        found = str(error)
    expected = _parts_by_hand(topology.readers)
    accelerator.end_training()
    return found, expected


def _parts_by_hand(readers: int) -> dict[str, Tensor]:
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, (x, y) in enumerate(_steps(readers)):
        losses = [_part_loss(model, x, y, reader, step) for reader in range(readers)]
        (sum(losses[1:], losses[0]) / readers).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def _steps(readers: int) -> list[tuple[Tensor, Tensor]]:
    rows = 3 * readers
    x, y = dataset(STEPS * rows).tensors
    return list(zip(x.split(rows), y.split(rows), strict=True))


def _part_loss(model: nn.Module, x: Tensor, y: Tensor, reader: int, step: int) -> Tensor:
    mine = slice(3 * reader, 3 * reader + 3)
    cut()
    return cross_entropy(model(x[mine], (reader + step) % 3), y[mine])
