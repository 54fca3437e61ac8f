"""What each rank of test_grids does: train a tiny language model by any loop that the strategy allows."""

from __future__ import annotations

from datetime import timedelta
from itertools import islice

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, GradientAccumulationPlugin, InitProcessGroupKwargs
from accel_testing.patience import patience

WORDS, LENGTH, WIDTH, HEADS = 18, 8, 16, 2
BATCHES, ROWS, WINDOW, NORM = 8, 8, 3, 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.before(x)
        split = (
            layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(torch.tanh(self.up(self.between(x))))


class Gpt(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.double()

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rows():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (BATCHES * ROWS, LENGTH + 1), generator=generator)
    return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def loss_of(model, batch):
    ids, targets = batch
    return cross_entropy(model(ids).flatten(0, 1), targets.flatten()), None


def optimizer_of(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.5)
    return torch.optim.AdamW(
        model.parameters(), lr=0.01, eps=1e-3
    )  # eps: keys' biases have gradients of rounding


def plain(optimizer, tied, whole_windows):
    """Final weights of one process, a loop over global batches.

    The last window has 2 of 3: its losses are divided by 3, and where it is given as a whole by 2.
    """
    model = Gpt(tied)
    made, batches = optimizer_of(optimizer, model), iter(DataLoader(rows(), ROWS))
    while window := list(islice(batches, WINDOW)):
        for batch in window:
            (loss_of(model, batch)[0] / (len(window) if whole_windows else WINDOW)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        made.step()
        made.zero_grad()
    return dict(model.state_dict())


def trained(optimizer, tied, whole_windows):
    """The same on a grid, in windows of 3, of which the last has 2."""
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(60)))
    windows = GradientAccumulationPlugin(num_steps=WINDOW)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=windows, kwargs_handlers=[limit])
    model, readers = Gpt(tied), accelerator.run.topology.readers
    loader = DataLoader(rows(), ROWS // readers)
    model, made, loader = accelerator.prepare(model, optimizer_of(optimizer, model), loader)
    if whole_windows:
        stream = iter(loader)
        while window := list(islice(stream, WINDOW)):
            accelerator.forward_backward(model, window, loss_of, microbatches=len(window))
            _step(accelerator, model, made)
    else:
        for batch in loader:
            with accelerator.accumulate(model, batch=batch):
                accelerator.backward(loss_of(model, batch)[0])
                _step(accelerator, model, made)
    found = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return found


def _step(accelerator, model, made):
    accelerator.clip_grad_norm_(model.parameters(), NORM)
    made.step()
    made.zero_grad()
