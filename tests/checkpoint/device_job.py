"""A small training on the simulated device or the CPU, saved or resumed after two steps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from accel_testing import simulated


def steps(
    folder: str, device: str, resume: bool, algorithm: str = "AdamW"
) -> tuple[dict[str, str], list[float]]:
    """Where each entry of the optimizer's state is after the checkpoint, and the losses from there on."""
    simulated.declare(Path(folder) / "plugins")
    from accel_core import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(device=device)
    module = nn.Linear(4, 4)
    inner = getattr(torch.optim, algorithm)(module.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(module, inner)

    def step() -> float:
        loss = model(torch.ones(2, 4, device=accelerator.device)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if resume:
        accelerator.load_state(Path(folder) / "here")
    else:
        step(), step()
        accelerator.save_state(Path(folder) / "here")
    where = {name: entry.device.type for state in inner.state.values() for name, entry in state.items()}
    losses = [step() for _ in range(3)]
    accelerator.end_training()
    return where, losses
