"""A model, its data, and the loop that a careful author writes with Transformer Engine by hand."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from accel_core import Accelerator, InitProcessGroupKwargs
from accel_testing.patience import patience
from accel_transformer_engine import TransformerEngineConfig

TIMEOUT = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(60)))
STEPS = 3
CONVERTED = ["first.weight", "block.up.weight", "block.down.weight", "head.weight"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Its head is tied to its words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 32)
        self.first = nn.Linear(32, 32)
        self.block = Block()
        self.last = nn.RMSNorm(32, eps=1e-6)
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.last(self.block(self.first(self.words(ids)))))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batches(count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(16, (count, 8, 5), generator=generator))


def loss_of(net: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(net(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def model_by_hand() -> nn.Module:
    """The same model, written with the library's layers and the same weights."""
    import transformer_engine.pytorch as te

    plain = model()
    net = model()
    net.first = te.Linear(32, 32)
    net.block.norm = te.LayerNorm(32)
    net.block.up = te.Linear(32, 64)
    net.block.down = te.Linear(64, 32)
    net.last = te.RMSNorm(32, eps=1e-6)
    net.head = te.Linear(32, 16, bias=False)
    net.head.weight = net.words.weight
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            net.get_parameter(name).copy_(parameter)
    return net


def by_hand(
    recipe: Any, window: int = 1, *, keeps: bool = False, shards: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the run that uses Transformer Engine directly.

    keeps: tell its layers which micro-batch of the window is the first. shards: divide the model.
    """
    import transformer_engine.pytorch as te

    net = model_by_hand()
    if shards:
        fully_shard(net)
        warnings.filterwarnings("ignore", ".*returned a view tensor")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    first: dict[str, Any] = {"is_first_microbatch": None}

    def say_which(_layer: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, **first}

    for layer in net.modules():
        if isinstance(layer, te.Linear):
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: (args, {**kwargs, **first}), with_kwargs=True
            )
    for ids in batches():
        for number, part in enumerate(ids.chunk(window)):
            first["is_first_microbatch"] = number == 0 if keeps else None
            with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(recipe=recipe):
                logits = net(part[:, :-1])
            loss = cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())
            (loss / window).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.detach() for name, value in net.named_parameters()}
    if shards:
        weights = {name: value.full_tensor() for name, value in weights.items()}
    return losses, weights


def accelerator(strategy: str | None = None, *plugins: Any, **options: Any) -> Accelerator:
    config = TransformerEngineConfig(**options)
    return Accelerator(
        device="cpu", strategy=strategy, mixed_precision="fp8-te", plugins=[TIMEOUT, config, *plugins]
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


def train_in_windows(run: Accelerator, net: Any, optimizer: Any, steps: int = STEPS) -> list[float]:
    """Each batch is a window of two micro-batches."""
    run.gradient_accumulation_steps = 2
    losses = []
    for ids in batches(steps):
        for part in ids.chunk(2):
            with run.accumulate(net):
                losses += steps_of(run, net, optimizer, [part])
    return losses


def weights(run: Accelerator, net: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().clone() for name, tensor in run.get_state_dict(net, rank0_only=False).items()
    }
