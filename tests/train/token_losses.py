"""Token losses over sequences of any lengths, and the plain PyTorch loop over whole global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

VOCABULARY = 11
GLOBAL = 8
LENGTHS = [3, 17, 1, 9, 2, 5, 12, 1, 7, 7, 30, 4, 1, 1, 2, 8, 6, 19, 2, 3, 10, 1, 5, 4]
"""Of 24 sequences: three global batches. Quarters of a batch differ tenfold in tokens."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, VOCABULARY))


def sequences(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Each has one token more than its length: the last is only predicted."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length + 1,), generator=generator) for length in lengths]


def padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs and labels (rows, longest); -100 where there is nothing to predict."""
    inputs = pad_sequence([row[:-1] for row in rows], batch_first=True)
    return inputs, pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")


def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)


def plain(
    clip: float | None = None, lengths: Sequence[int] = LENGTHS, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The weights after one step a global batch, the loss a mean over its tokens."""
    network = model().to(dtype)
    optimizer = optimizer_of(network)
    rows = sequences(lengths)
    for start in range(0, len(rows), GLOBAL):
        inputs, labels = padded(rows[start : start + GLOBAL])
        (loss_sum(network(inputs), labels) / max(1, (labels != -100).sum().item())).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in network.parameters()]


def tokens(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


def micro_batches(accelerator: Any, lengths: Sequence[int] = LENGTHS) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of each global batch, in as many micro-batches as a window has."""
    topology = accelerator.run.topology
    share = GLOBAL // topology.readers
    size, rows = share // accelerator.gradient_accumulation_steps, sequences(lengths)
    for start in range(topology.reader * share, len(rows), GLOBAL):
        for first in range(start, start + share, size):
            yield padded(rows[first : first + size])


def ours(
    accelerator: Any,
    clip: float | None = None,
    lengths: Sequence[int] = LENGTHS,
    items: Callable[[Any], Any] = tokens,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """The same in micro-batches."""
    network = model().to(dtype)
    network, optimizer = accelerator.prepare(network, optimizer_of(network))
    for window in accelerator.windows(micro_batches(accelerator, lengths), network, items=items):
        for inputs, labels in window:
            accelerator.backward(loss_sum(network(inputs), labels))
            if clip is not None:
                accelerator.clip_grad_norm_(network.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in accelerator.unwrap_model(network).parameters()]


def by_windows(accelerator: Any, clip: float | None = None) -> tuple[list[Tensor], list[float]]:
    """As `ours`, a window at a time, and the loss a token."""
    network, losses = model(), []
    network, optimizer = accelerator.prepare(network, optimizer_of(network))
    for window in accelerator.windows(micro_batches(accelerator), network, items=tokens):
        found = accelerator.forward_backward(
            network, window, lambda model, batch: (loss_sum(model(batch[0]), batch[1]), None)
        )
        if clip is not None:
            accelerator.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(found.loss, "mean").item())
    return [p.detach().clone() for p in accelerator.unwrap_model(network).parameters()], losses


def plain_losses() -> list[float]:
    """The loss a token of the loop over whole batches."""
    network = model()
    optimizer, losses, rows = optimizer_of(network), [], sequences()
    for start in range(0, len(rows), GLOBAL):
        inputs, labels = padded(rows[start : start + GLOBAL])
        loss = loss_sum(network(inputs), labels) / (labels != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
