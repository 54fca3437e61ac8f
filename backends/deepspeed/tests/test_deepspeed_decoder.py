"""A decoder with a schedule, clipping and accumulation has the numbers of one process."""

from __future__ import annotations

import pytest
import torch

from accel_core import Accelerator
from accel_deepspeed import DeepSpeedPlugin
from accel_testing import decoder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_decoder_trains_as_a_plain_loop(stage: int, run_processes) -> None:
    environment = {"ACCEL__STRATEGY": "deepspeed", "ACCEL__DEEPSPEED__ZERO_STAGE": str(stage)}
    for found in run_processes(decoder.trained, world=2, environment=environment, timeout=120):
        decoder.assert_as_in_one_process(found)


def cycled(stage: int) -> list[float]:
    accelerator = Accelerator(device="cpu", plugins=[DeepSpeedPlugin(zero_stage=stage)])
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=3)
    schedule, rates = accelerator.prepare(schedule), []
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 2)).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    accelerator.end_training()
    return rates


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_schedule_that_cycles_momentum_is_made_from_the_prepared_optimizer(
    stage: int, run_processes
) -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1, momentum=0.9)
    plain = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=3)
    optimizer.step()
    plain.step()
    rates = plain.get_last_lr()
    plain.step()
    for found in run_processes(cycled, stage, world=1, timeout=120):
        assert found == pytest.approx([*rates, *plain.get_last_lr()])
