"""What each rank of test_grids does: train a tiny language model by any loop that the strategy allows."""

from __future__ import annotations

from datetime import timedelta
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core import Accelerator, GradientAccumulationPlugin, InitProcessGroupKwargs
from accel_testing.decoder import NORM, ROWS, WINDOW, Decoder, loss_of, rows
from accel_testing.patience import patience


def model_of(tied):
    return Decoder(tied).double()


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
    model = model_of(tied)
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
    model, readers = model_of(tied), accelerator.run.topology.readers
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
    found = {
        name: tensor.clone() for name, tensor in accelerator.get_state_dict(model, rank0_only=False).items()
    }
    accelerator.end_training()
    return found


def _step(accelerator, model, made):
    accelerator.clip_grad_norm_(model.parameters(), NORM)
    made.step()
    made.zero_grad()
