"""An update gives the device work, and waits for none of it."""

from __future__ import annotations

import torch
from torch import nn


def test_an_update_does_not_wait_for_the_device(run_processes) -> None:
    assert run_processes(waits, world=1) == [(0, True)]


def waits() -> tuple[int, bool]:
    """Return how often updates waited, and whether reading a value is seen as a wait."""
    from accel_testing.simulated.device import simulate

    module = simulate("sim")
    from accel_core import Accelerator
    from accel_ema import EMAConfig

    accelerator = Accelerator(device="sim", plugins=[EMAConfig(decay=0.5)])
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (unit,) = accelerator.run.units
    inputs, waited = torch.ones(1, 3, device="sim"), 0
    for _ in range(4):
        accelerator.backward(model(inputs).sum())
        optimizer.step()
        optimizer.zero_grad()
        before = module.waits
        accelerator.run.plugins["ema"].average_of(unit).note_step(0)  # type: ignore[attr-defined]
        waited += module.waits - before
    before = module.waits
    model.weight.sum().item()
    return waited, module.waits > before
