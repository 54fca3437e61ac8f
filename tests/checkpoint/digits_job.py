"""The job of test_checkpoint_digits: a real, random-number-consuming training that saves as it goes."""

from __future__ import annotations

import gzip
import os
import random
import signal
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator

SAVE_EVERY = 5


def digits() -> TensorDataset:
    """The UCI digits that ship with scikit-learn, read without its import, which takes seconds."""
    (folder,) = find_spec("sklearn").submodule_search_locations
    with gzip.open(Path(folder) / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        rows = torch.tensor([[float(value) for value in line.split(",")] for line in file])
    return TensorDataset(rows[:, :64].view(-1, 1, 8, 8) / 16, rows[:, 64].long())


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def train(folder: str, steps: int, *, kill_at: int | None = None, accumulate: int = 1) -> dict[int, str]:
    """Train to `steps`, from the checkpoint if there is one; die without a word after step `kill_at`.

    Returns each micro-batch's loss, as exact text.
    """
    torch.manual_seed(0)
    random.seed(0)
    accelerator = Accelerator(device="cpu", gradient_accumulation_steps=accumulate)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 20, 40], gamma=0.5)
    loader = DataLoader(digits(), batch_size=32, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    checkpoint = Path(folder) / "latest"
    if checkpoint.exists():
        accelerator.load_state(checkpoint)
    losses: dict[int, str] = {}
    while progress.step < steps:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs * random.uniform(0.9, 1.1)), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses[progress.step] = loss.detach().item().hex()
            progress.step += 1
            if progress.step % SAVE_EVERY == 0 and accelerator.sync_gradients:
                accelerator.save_state(checkpoint)
            if progress.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if progress.step == steps:
                break
    accelerator.end_training()
    return losses


class Progress:
    """The user's own counter."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]
