"""A small training, as a plain loop and with an Accelerator, for DeepSpeed's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator
from accel_deepspeed import DeepSpeedPlugin

SAMPLES, BATCH = 26, 4  # ragged: the last batch is shorter


@frozen(kw_only=True)
class Recipe:
    accumulation: int = 1
    clip: float | None = None
    schedule: bool = False
    epochs: int = 2


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randn(samples, 3, generator=generator)
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.Adagrad([{"params": [first]}, {"params": others, "lr": 0.01}], lr=0.1)


def falling(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def accelerator(plugin: DeepSpeedPlugin | None = None, **more: Any) -> Accelerator:
    return Accelerator(cpu=True, plugins=[plugin or DeepSpeedPlugin()], **more)


def native(recipe: Recipe, world: int, make: Callable[[Any], Any] = adamw) -> list[float]:
    """Losses, norms and final weights of the same training by hand, in one process."""
    model = network()
    optimizer = make(model.parameters())
    rate = falling(optimizer)
    found: list[float] = []
    loader = DataLoader(data(), batch_size=BATCH)
    for _ in range(recipe.epochs):
        rounds = _rounds(list(loader), world)
        for number, batches in enumerate(rounds, 1):
            losses = [mse_loss(model(x), y) for x, y in batches]
            loss = torch.stack(losses).mean()
            (loss / recipe.accumulation).backward()
            found.append(loss.item())
            if number % recipe.accumulation == 0 or number == len(rounds):
                if recipe.clip:
                    found.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip).item())
                optimizer.step()
                if recipe.schedule:
                    rate.step()
                optimizer.zero_grad()
    return found + weights(model)


def _rounds(batches: list[Any], world: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Batches of all ranks, round by round; what lacks in the last round begins from the start again."""
    if world == 1:
        return [[tuple(batch)] for batch in batches]
    x, y = (torch.cat([batch[part] for batch in batches]) for part in (0, 1))
    short = -len(x) % (world * BATCH)
    x, y = torch.cat([x, x[:short]]), torch.cat([y, y[:short]])
    parts = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    return [parts[at : at + world] for at in range(0, len(parts), world)]


def weights(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()]).tolist()


def train(ours: Accelerator, recipe: Recipe, make: Callable[[Any], Any] = adamw) -> list[float]:
    """The loop of a user: losses (mean over ranks), norms, and final weights."""
    model: Any = network()
    optimizer = make(model.parameters())
    rate = falling(optimizer)
    model, optimizer, rate, loader = ours.prepare(model, optimizer, rate, DataLoader(data(), BATCH))
    return loop(ours, recipe, model, optimizer, rate, loader)


def loop(
    ours: Accelerator, recipe: Recipe, model: Any, optimizer: Any, rate: Any, loader: Any
) -> list[float]:
    found: list[float] = []
    for _ in range(recipe.epochs):
        for x, y in loader:
            with ours.accumulate(model):
                loss = mse_loss(model(x).float(), y)
                ours.backward(loss)
                found.append(ours.reduce(loss.detach(), "mean").item())
                if ours.sync_gradients and recipe.clip:
                    found.append(float(ours.clip_grad_norm_(model.parameters(), recipe.clip)))
                optimizer.step()
                if recipe.schedule:
                    rate.step()
                optimizer.zero_grad()
    return found + whole_weights(ours, model)


def whole_weights(ours: Accelerator, model: Any) -> list[float]:
    tensors = [tensor.float().flatten() for _, tensor in ours.iter_weights(model)]
    return torch.cat(tensors).tolist()
