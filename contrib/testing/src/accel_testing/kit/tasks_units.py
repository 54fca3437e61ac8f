"""Several units of one run against plain loops: a GAN, a teacher and student."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accel_core import Accelerator
from accel_testing.kit.network import FEATURES, dataset, network
from accel_testing.kit.tasks import cut, make
from accel_testing.kit.tasks_training import Trace, reference, weights

__all__ = ["distillation", "gan"]


def gan(accumulation: int, arguments: Mapping[str, Any]) -> tuple[Trace, Trace]:
    """Train generator and discriminator with windows of their own; a plain loop too."""
    accelerator = make(arguments, gradient_accumulation_steps=accumulation)
    trace, reference = Trace(), Trace()
    _play(trace, _Accelerated(accelerator))
    _play(reference, _ByHand(accumulation, accelerator.device, accelerator.mixed_precision))
    accelerator.end_training()
    return trace, reference


class _ByHand:
    """Two models and two optimizers, a counter for each."""

    def __init__(self, accumulation: int, device: torch.device, precision: str) -> None:
        self.accumulation, self.device, self.precision = accumulation, device, precision
        self.models = [reference.convert(each.to(device), precision) for each in _players()]
        self.optimizers = _players_optimizers(self.models)
        self.counts = [0, 0]
        self.scalers = [torch.amp.GradScaler(device.type, enabled=precision == "fp16") for _ in self.models]
        self.batches: Iterable[Any] = [tuple(t.to(device) for t in batch) for batch in _real_batches()]

    def forward(self, player: int, x: Tensor) -> Tensor:
        with reference.context(self.precision, self.device):
            output: Tensor = self.models[player](x)
        return output.float()

    def learn(self, player: int, loss: Callable[[], Tensor], last: bool) -> float:
        cut()
        value = loss()
        self.scalers[player].scale(value / self.accumulation).backward()
        self.counts[player] += 1
        if self.counts[player] % self.accumulation == 0 or last:
            self.counts[player] = 0
            self.scalers[player].step(self.optimizers[player])
            self.scalers[player].update()
            self.optimizers[player].zero_grad()
        return value.item()


class _Accelerated:
    """The same with one Accelerator and two units."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        players = _players()
        objects = accelerator.prepare(*players, *_players_optimizers(players), _real_batches())
        self.models, self.optimizers = list(objects[:2]), list(objects[2:4])
        self.batches: Iterable[Any] = objects[4]

    def forward(self, player: int, x: Tensor) -> Tensor:
        output: Tensor = self.models[player](x)
        return output.float()

    def learn(self, player: int, loss: Callable[[], Tensor], last: bool) -> float:
        with self.accelerator.accumulate(self.models[player]):
            value = loss()
            self.accelerator.backward(value)
            self.optimizers[player].step()
            self.optimizers[player].zero_grad()
        return value.item()


def _players() -> list[nn.Module]:
    generator, discriminator = network(2), network(3)
    generator[3] = last = nn.Linear(16, FEATURES)
    with torch.no_grad():
        last.weight.fill_(0.1)
        last.bias.zero_()
    return [generator, discriminator]


def _players_optimizers(models: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]


def _real_batches() -> DataLoader[Any]:
    return DataLoader(dataset(40), batch_size=4)


def _play(trace: Trace, table: _ByHand | _Accelerated) -> None:
    generator, discriminator = table.models
    for number, (real, _) in enumerate(table.batches, 1):

        def score(x: Tensor) -> Tensor:
            return table.forward(1, x)[:, 0].mean()

        def discriminate(real: Tensor = real) -> Tensor:
            fake = table.forward(0, real.flip(0)).detach()
            return (score(fake) - 1) ** 2 + score(real) ** 2

        def generate(real: Tensor = real) -> Tensor:
            return score(table.forward(0, real.flip(0))) ** 2

        trace.losses.append(table.learn(1, discriminate, last=number == 10))
        discriminator.requires_grad_(False)
        trace.losses.append(table.learn(0, generate, last=number == 10))
        discriminator.requires_grad_(True)
    whole = table.accelerator if isinstance(table, _Accelerated) else None
    trace.weights.extend(weights(generator, whole) + weights(discriminator, whole))


def distillation(arguments: Mapping[str, Any]) -> tuple[Trace, Trace]:
    """Return a student and a teacher without optimizer, by hand and as two units."""
    accelerator = make(arguments)
    teacher = accelerator.prepare(network(5))
    student = network(6)
    student, optimizer, batches = accelerator.prepare(
        student, torch.optim.SGD(student.parameters(), lr=0.1), _real_batches()
    )
    trace = Trace()
    for x, _ in batches:
        with torch.no_grad():
            target = teacher(x).float()
        loss = mse_loss(student(x).float(), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(loss.item())
    trace.weights.extend(weights(student, accelerator) + weights(teacher, accelerator))
    reference = _distillation_by_hand(accelerator.device, accelerator.mixed_precision)
    accelerator.end_training()
    return trace, reference


def _distillation_by_hand(device: torch.device, precision: str) -> Trace:
    trace = Trace()
    teacher, student = (reference.convert(network(seed).to(device), precision) for seed in (5, 6))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    for batch in _real_batches():
        cut()
        x = batch[0].to(device)
        with reference.context(precision, device):
            with torch.no_grad():
                target = teacher(x)
            output = student(x)
        loss = mse_loss(output.float(), target.float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        trace.losses.append(loss.item())
    trace.weights.extend(weights(student) + weights(teacher))
    return trace
