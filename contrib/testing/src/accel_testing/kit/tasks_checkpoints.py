"""The trainings of level 4: saved, resumed by other stacks, refused, killed.

The kit's own network has what checkpoints must cope with: tied and frozen weights, buffers of both kinds,
two optimizers (one, where the stack takes no more) with a schedule each, shuffled data that is left in
the middle of an epoch.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from xxhash import xxh3_64_hexdigest

from accel_core import CheckpointError
from accel_testing.kit.network import CLASSES, FEATURES, given, network
from accel_testing.kit.tasks import OFFERS, Scenario, learn, make

__all__ = ["Seen", "killed", "misfit", "names", "replicas", "resume", "save", "survived"]

R = TypeVar("R")

GLOBAL_BATCH, EPOCH, SAVED_AT, STEPS = 8, 5, 3, 8


@frozen
class Seen:
    """The numbers of a process after its checkpoint, one per step."""

    losses: list[float] = field(factory=list)
    rates: list[float] = field(factory=list)
    samples: list[list[int]] = field(factory=list)
    draws: list[tuple[float, ...]] = field(factory=list)


class Network(nn.Module):
    """6 features to 3 classes."""

    def __init__(self, seed: int, *, noise: float, larger: bool) -> None:
        super().__init__()  # registered in the order of forward, by which a model may be cut into stages
        self.fixed = nn.Linear(FEATURES, FEATURES, bias=False).requires_grad_(requires_grad=False)
        self.body = network(seed)
        self.hidden, self.again = (nn.Linear(CLASSES, CLASSES, bias=False) for _ in range(2))
        with torch.no_grad():
            for layer in (self.hidden, self.again, self.fixed):
                layer.weight.copy_(torch.eye(len(layer.weight)) * (1.1 + seed))
        self.again.weight = self.hidden.weight
        self.noise = nn.Dropout(noise)
        self.larger = nn.Linear(2, 2) if larger else None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ones", torch.ones(CLASSES), persistent=False)
        self.calls: Tensor
        self.ones: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.noise(self.body(self.fixed(x)))
        output: Tensor = self.again(torch.tanh(self.hidden(hidden))) * self.ones
        return output


class Training:
    """A prepared run. With another seed, all state that is restored differs."""

    def __init__(
        self, arguments: Mapping[str, Any], *, seed: int = 0, noise: float = 0.0, larger: bool = False
    ) -> None:
        self.accelerator = accelerator = make(arguments)
        self.step = 0
        torch.manual_seed(seed)
        model = _network(seed, noise=noise, larger=larger)
        made = _optimizers(model, seed)
        falling = [torch.optim.lr_scheduler.MultiStepLR(each, [2, 4, 6], gamma=0.5) for each in made]
        samples = GLOBAL_BATCH * EPOCH
        batches: DataLoader[Any] = DataLoader(
            TensorDataset(*given.dataset(samples).tensors, torch.arange(samples)),
            batch_size=GLOBAL_BATCH // accelerator.run.topology.readers,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
        )
        accelerator.register_for_checkpointing(self)
        self.model, self.batches, *rest = accelerator.prepare(model, batches, *made, *falling)
        self.optimizers, self.schedulers = rest[: len(made)], rest[len(made) :]
        self.noisy = noise > 0

    def state_dict(self) -> dict[str, int]:
        """Return the user's own counter."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from it."""
        self.step = state["step"]

    def train(self, checkpoint: Path | None = None) -> Seen:
        """To the end, saved on the way if `checkpoint` is given; what was seen since."""
        seen = Seen()
        while self.step < STEPS:
            for *batch, ids in self.batches:
                seen.losses.append(self._learn(batch))
                seen.rates.append(self.optimizers[0].param_groups[0]["lr"])
                seen.samples.append(ids.tolist())
                if self.noisy:
                    seen.draws.append(_draw(self.accelerator.device))
                self.step += 1
                if self.step == SAVED_AT and checkpoint is not None:
                    self.accelerator.save_state(str(checkpoint))
                    seen = Seen()
                if self.step == STEPS:
                    break
        return seen

    def _learn(self, batch: Sequence[Tensor]) -> float:
        (loss,) = learn(self.accelerator, self.model, [batch], given.forward_loss)
        for each in (*self.optimizers, *self.schedulers):
            each.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return loss

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield (key, leaf) of this process's state, without buffers, which may differ."""
        (unit,) = self.accelerator.run.units
        for name, leaf in unit.hooks.model_state(unit).items():
            if name in unit.named_parameters():
                yield f"model/{name}", leaf
        for optimizer in unit.optimizers:
            for name, leaf in unit.hooks.optimizer_state(unit, optimizer).leaves.items():
                yield f"optimizer/{name}", leaf

    def fill(self, value: int) -> None:
        """Make every number of the state the same."""
        self.step = value
        with torch.no_grad():
            for _, leaf in self.leaves():
                for _, tensor in leaf.shards:
                    tensor.fill_(value % 64)
            for unit in self.accelerator.run.units:  # a strategy without live tensors writes back what it did
                unit.hooks.load_state(unit, {})

    def digests(self) -> dict[str, str]:
        """Return a digest of each box of the state that this rank holds."""
        return {
            f"{key} at {offset}": xxh3_64_hexdigest(_bytes_of(tensor))
            for key, leaf in self.leaves()
            for offset, tensor in leaf.shards
        }

    def numbers(self) -> set[float]:
        """Every number in the state."""
        tensors = (tensor for _, leaf in self.leaves() for _, tensor in leaf.shards)
        return {value for tensor in tensors for value in tensor.float().cpu().flatten().tolist()}


def _network(seed: int, *, noise: float, larger: bool) -> nn.Module:
    kind = given.network if given.named else Network
    model: nn.Module = kind(seed, noise=noise, larger=larger)
    return model


def _optimizers(model: nn.Module, seed: int) -> list[torch.optim.Optimizer]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if given.named:
        return [given.optimizer(trained, 0.02 + seed)]
    first = 3 if "several_optimizers" in os.environ[OFFERS].split() else 0
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(trained[first:], lr=0.02 + seed)]
    if first:
        made.insert(0, torch.optim.SGD(trained[:first], lr=0.05 + seed, momentum=0.9))
    return made


def _state_names(model: nn.Module) -> set[str]:
    """Return the names of its state, tied weights once, under their first name."""
    once = {name for name, _ in model.named_parameters()}
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return model.state_dict().keys() - again


def _draw(device: torch.device) -> tuple[float, ...]:
    drawn = torch.rand((), device=device).item(), torch.rand(()).item()
    return (*drawn, random.random(), np.random.rand())  # noqa: NPY002, S311 - the global streams


def _bytes_of(tensor: Tensor) -> bytes:
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def _each(
    scenarios: Sequence[Scenario], arguments: Mapping[str, Any], task: Callable[..., Any]
) -> dict[str, Any]:
    """Run `task` in each scenario; an error that all ranks raise is its text."""
    found: dict[str, Any] = {}
    for scenario in scenarios:
        try:
            with scenario.entered():
                found[str(scenario)] = task(scenario, scenario.arguments(arguments))
        except Exception as error:  # one pair of a matrix that fails must not hide the others
            found[str(scenario)] = f"{type(error).__name__}: {error}"
    return found


def _trained(given: Mapping[str, Any], task: Callable[[Training], R], *, seed: int = 0, **more: Any) -> R:
    training = Training(given, seed=seed, **more)
    try:
        return task(training)
    finally:
        training.accelerator.end_training()


def save(
    folder: str, scenarios: Sequence[Scenario], noise: float, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Train each scenario, save it under its name, train on, and return the rest."""

    def task(scenario: Scenario, given: Mapping[str, Any]) -> Seen:
        return _trained(given, lambda training: training.train(Path(folder) / str(scenario)), noise=noise)

    return _each(scenarios, arguments, task)


def resume(
    folder: str,
    saved: Sequence[str],
    scenarios: Sequence[Scenario],
    noise: float,
    arguments: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Resume each checkpoint in each scenario, in a run with other state before."""

    def go_on(name: str, training: Training) -> Seen:
        training.accelerator.load_state(str(Path(folder) / name))
        return training.train()

    def task(name: str, scenario: Scenario, given: Mapping[str, Any]) -> Seen:
        return _trained(given, partial(go_on, name), seed=1, noise=noise)

    return {name: _each(scenarios, arguments, partial(task, name)) for name in saved}


def saved_again(
    folder: str, name: str, at_once: bool, arguments: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of state that was resumed and saved again, and of the next resume.

    at_once: it was also saved between load and the first step, as programs that convert a checkpoint do.
    """
    again = str(Path(folder) / f"{name}-again-{at_once}")

    def go_on(training: Training) -> dict[str, str]:
        training.accelerator.load_state(str(Path(folder) / name))
        if at_once:
            training.accelerator.save_state(again)
        training.train()
        training.accelerator.save_state(again)
        return training.digests()

    def load(training: Training) -> dict[str, str]:
        training.accelerator.load_state(again)
        return training.digests()

    return _trained(arguments, go_on, seed=1), _trained(arguments, load, seed=2)


def names(arguments: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names under which a model's state is offered, and its own."""

    def task(training: Training) -> tuple[list[str], list[str]]:
        (unit,) = training.accelerator.run.units
        named = _state_names(_network(0, noise=0.0, larger=False))
        return sorted(unit.hooks.model_state(unit)), sorted(named)

    return _trained(arguments, task)


def replicas(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Digest of each box that is declared to be a replica, after training."""

    def task(training: Training) -> dict[str, str]:
        training.train()
        replicated = {key for key, leaf in training.leaves() if leaf.replicated}
        return {
            box: digest
            for box, digest in training.digests().items()
            if box.partition(" at ")[0] in replicated
        }

    return _trained(arguments, task)


def misfit(folder: str, name: str, arguments: Mapping[str, Any]) -> tuple[str, list[str], bool]:
    """Load a checkpoint into a larger model: the error, its names, any change."""
    small, large = (_state_names(_network(0, noise=0.0, larger=larger)) for larger in (False, True))
    lacking = sorted(large - small)

    def task(training: Training) -> tuple[str, list[str], bool]:
        before = training.numbers()
        try:
            training.accelerator.load_state(str(Path(folder) / name))
        except CheckpointError as error:
            return str(error), lacking, training.numbers() != before
        return "it was loaded", lacking, True

    return _trained(arguments, task, seed=1, larger=True)


def killed(folder: str, instant: float, arguments: Mapping[str, Any]) -> None:
    """Save repeatedly, and be killed at `instant`, measured in durations of a save."""
    training, target = Training(arguments), Path(folder) / "latest"
    last = _survivor(training, target)
    training.train()
    begun = time.perf_counter()
    for step in (last + 1, last + 2):
        _save(training, target, step)
    if training.accelerator.is_last_process:
        # SIGALRM ends a process as SIGKILL does: nobody here is asked.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, instant * (time.perf_counter() - begun) / 2))
    for step in range(last + 3, last + 1000):
        _save(training, target, step)


def survived(folder: str, arguments: Mapping[str, Any]) -> int:
    """Return the checkpoint's step, after a look at every number in it."""
    return _trained(arguments, lambda training: _survivor(training, Path(folder) / "latest"), seed=1)


def _save(training: Training, target: Path, step: int) -> None:
    training.fill(step)
    training.accelerator.save_state(str(target))
    if training.accelerator.is_main_process:
        with _told(target).open("a") as told:
            told.write(f"{step}\n")


def _told(target: Path) -> Path:
    return target.with_name("told")


def _survivor(training: Training, target: Path) -> int:
    if not _told(target).exists():
        return 0
    committed = int(_told(target).read_text().split("\n")[-2])
    training.accelerator.load_state(str(target))
    assert training.numbers() == {training.step % 64}, f"a mixture of two saves in step {training.step}"
    assert training.step >= committed, f"step {training.step} was loaded, {committed} was committed"
    return training.step
