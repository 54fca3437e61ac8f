"""A tiny decoder, trained by a plain loop in one process, and by the same loop on any stack.

The loop is the one that people write: accumulation with a short last window, clipping, and a schedule that is
made from the prepared loader. Losses, norms and rates must be those of one process.

```python
for found in run_processes(decoder.trained, world=2, environment={"ACCEL__STRATEGY": "fsdp"}):
    decoder.assert_as_in_one_process(found)
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from math import ceil
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from accel_core import Accelerator
from accel_testing.kit.compare import assert_near

__all__ = [
    "Decoder",
    "Trace",
    "assert_as_in_one_process",
    "loss_of",
    "plain",
    "rows",
    "trained",
]

WORDS, LENGTH, WIDTH, HEADS, BLOCKS = 18, 8, 16, 2, 4
EXPERTS, CHOSEN = 4, 2
"""Experts of a layer of a sparse decoder, and how many of them compute a token."""
BATCHES, ROWS, WINDOW, EPOCHS, NORM = 8, 8, 3, 2, 0.5
"""Global batches of an epoch, rows of each, batches of a window, epochs, and the norm that is left."""
SPLIT: Final = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")} | {
    f"blocks.*.{name}": "rowwise" for name in ("o", "down")
}
"""A plan of tensor parallelism for the decoder's layers."""


class Trace(NamedTuple):
    """Numbers of each optimizer step."""

    losses: list[float]
    norms: list[float]
    rates: list[float]


class Experts(nn.Module):
    """The weights of a layer's experts, stacked: (EXPERTS, ...). Called as transformers calls its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)

    def forward(
        self, tokens: Tensor, experts: Tensor, weights: Tensor
    ) -> Tensor:  # (T, WIDTH), (T, CHOSEN) twice
        out = torch.zeros_like(tokens)
        for expert in experts.unique().tolist():
            token, place = (experts == expert).nonzero(as_tuple=True)
            made = torch.tanh(tokens[token] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, token, (made * weights[token, place, None]).to(out.dtype))
        return out


class Mixture(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:  # (B, S, WIDTH)
        tokens = x.flatten(0, -2)
        weights, experts = self.router(tokens).softmax(-1).topk(CHOSEN)
        out: Tensor = self.experts(tokens, experts, weights).view_as(x)
        return out


class Block(nn.Module):
    """Causal attention, and a feed-forward layer or a mixture of experts."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if sparse:
            self.mixture = Mixture()
        else:
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.sparse = sparse

    def forward(self, x: Tensor) -> Tensor:  # (B, S, WIDTH)
        h = self.before(x)
        query, key, value = (
            layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = self.attend(query, key, value)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        h = self.between(x)
        out: Tensor = x + (self.mixture(h) if self.sparse else self.down(torch.tanh(self.up(h))))
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # (B, HEADS, S, WIDTH / HEADS)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Decoder(nn.Module):
    """Learnt positions, which the model counts if it is given none. The same weights each time.

    sparse: every second block has a mixture of experts.
    """

    def __init__(self, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(sparse and at % 2 == 1) for at in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:  # (B, S)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rows() -> Any:
    """Return the sequences of an epoch."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (BATCHES * ROWS, LENGTH + 1), generator=generator)
    return [{"input_ids": row[:-1], "targets": row[1:]} for row in words]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
    """Return the mean over the batch's tokens. Positions are left to the model."""
    output = model(batch["input_ids"])
    logits = getattr(output, "logits", output)  # of a model of transformers
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()), None


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def _schedule(optimizer: Any, batches: int) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, T_max=EPOCHS * ceil(batches / WINDOW))


@cache
def plain(whole_windows: bool = False, make: Callable[[], nn.Module] = Decoder) -> Trace:
    """Return what a loop without accel-core computes in one process.

    whole_windows: the loss of the short last window is the mean of its own batches, as in `forward_backward`.
    make: returns the model, with the same weights each time.
    """
    model, loader, trace = make(), DataLoader(rows(), ROWS), Trace([], [], [])
    optimizer = _optimizer(model)
    scheduler = _schedule(optimizer, len(loader))
    for window in _windows(loader):
        losses = torch.stack([loss_of(model, batch)[0] for batch in window])
        (losses.sum() / (len(window) if whole_windows else WINDOW)).backward()
        trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), NORM)))
        trace.rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        trace.losses.append(losses.mean().item())
    return trace


def _windows(loader: Any) -> Iterator[list[Any]]:
    for _ in range(EPOCHS):
        batches = iter(loader)
        while window := list(islice(batches, WINDOW)):
            yield window


def trained(
    whole_windows: bool = False,
    accelerator: Accelerator | None = None,
    *,
    make: Callable[[], nn.Module] = Decoder,
    loss_of: Callable[[nn.Module, Any], tuple[Tensor, None]] = loss_of,
) -> Trace:
    """Return the same of the stack that is configured, or of this Accelerator's. On all ranks.

    whole_windows: by `forward_backward`, for strategies that own the schedule.
    """
    accelerator = accelerator or Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = WINDOW
    model: Any = make()
    trace = Trace([], [], [])
    optimizer = _optimizer(model)
    loader: Any = DataLoader(rows(), ROWS // accelerator.run.topology.readers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = accelerator.prepare(_schedule(optimizer, len(loader)))

    def end(losses: list[Tensor]) -> None:
        rate, norm = scheduler.get_last_lr()[0], accelerator.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if norm is not None:  # the window's last batch
            trace.norms.append(float(norm))
            trace.rates.append(rate)
            trace.losses.append(accelerator.reduce(torch.stack(losses).mean(), "mean").item())
            losses.clear()

    if whole_windows:
        for window in _windows(loader):
            found = accelerator.forward_backward(model, window, loss_of, microbatches=len(window))
            end([found.loss])
    else:
        losses: list[Tensor] = []
        for batch in (each for _ in range(EPOCHS) for each in loader):
            with accelerator.accumulate(model, batch=batch):
                loss, _ = loss_of(model, batch)
                accelerator.backward(loss)
                losses.append(loss.detach())
                end(losses)
    accelerator.end_training()
    return trace


def assert_as_in_one_process(
    found: Trace,
    *,
    whole_windows: bool = False,
    low_precision: bool = False,
    make: Callable[[], nn.Module] = Decoder,
) -> None:
    """Raise AssertionError if losses, norms or rates differ from `plain`."""
    expected = plain(whole_windows, make)
    for name, values in found._asdict().items():
        assert_near(name, values, getattr(expected, name), low_precision=low_precision)
