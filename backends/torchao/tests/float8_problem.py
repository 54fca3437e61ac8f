"""A model, its data, and the loop that a careful author writes with torchao by hand."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from accel_core import Accelerator, InitProcessGroupKwargs
from accel_testing.patience import patience
from accel_torchao import Float8Config

TIMEOUT = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(60)))
STEPS = 4
CONVERTED = ["block.up.weight", "block.down.weight"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Its head is tied to its words; the first and the last linear layer are not in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 32)
        self.first = nn.Linear(32, 32)
        self.block = Block()
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.block(self.first(self.words(ids))))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batches(count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(16, (count, 8, 4), generator=generator))


def loss_of(net: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(net(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def float8_by_hand(net: nn.Module, recipe: str, chosen: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own import, for kernels that need a GPU
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(recipe)
    net = convert_to_float8_training(net, config=config, module_filter_fn=lambda _, name: chosen(name))
    for layer in net.modules():
        if isinstance(layer, Float8Linear):  # torchao casts under CUDA's autocast only
            layer.register_forward_pre_hook(lambda _, args: tuple(x.bfloat16() for x in args))
    return net


def by_hand(recipe: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the run that uses torchao directly."""
    net = float8_by_hand(model(), recipe, lambda name: name.startswith("block"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for ids in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(ids[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net.state_dict()


def accelerator(strategy: str | None = None, *plugins: Any, **options: Any) -> Accelerator:
    config = Float8Config(**options)
    return Accelerator(
        device="cpu", strategy=strategy, mixed_precision="fp8", plugins=[TIMEOUT, config, *plugins]
    )


def train(run: Accelerator, steps: int = STEPS, lr: float = 0.1) -> tuple[list[float], Any, Any]:
    """Each rank trains on the whole batch, so that all worlds see the same gradients."""
    net = model()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=lr))
    return steps_of(run, net, optimizer, batches(steps)), net, optimizer


def steps_of(run: Accelerator, net: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for ids in data:
        loss = loss_of(net, ids)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(run: Accelerator, net: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().clone() for name, tensor in run.get_state_dict(net, rank0_only=False).items()
    }
