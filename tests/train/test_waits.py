"""The host runs ahead of the device: in a step nothing of ours waits for it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.simulated
STEPS = 6


def waits(precision, options, strategy="auto"):
    """How often the host waits in each step of an ordinary loop, from the third step on."""
    from accel_testing.simulated.device import simulate

    module = simulate("sim")
    # Torch lets Python have a single device: each rank is a machine of its own.
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if "RANK" in os.environ:
        os.environ.update(GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE=os.environ["WORLD_SIZE"])
    from accel_core import Accelerator, DataLoaderConfiguration

    torch.manual_seed(0)
    accelerator = Accelerator(
        device="sim",
        mixed_precision=precision,
        gradient_accumulation_steps=options["accumulation"],
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        strategy=strategy,
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    rows = 4 * STEPS * accelerator.num_processes
    data = TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1))
    loader = DataLoader(data, 4, num_workers=options["workers"])
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    found = []
    before = module.waits
    counted = options["items"]
    windows = accelerator.windows(map(tuple, loader), model, items=lambda batch: batch[1].new_full((), 4.0))
    for x, y in chain.from_iterable(windows) if counted else loader:
        with nullcontext() if counted else accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y, reduction="sum" if counted else "mean")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if options["clip"] == "norm":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                if options["clip"] == "value":
                    accelerator.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append(module.waits - before)
        before = module.waits
    accelerator.end_training()
    return found[2:]  # torch arranges ddp's buckets anew after the first


ORDINARY = {"accumulation": 1, "workers": 0, "items": False, "clip": "norm"}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "asked",
    [{}, {"accumulation": 3}, {"clip": "value"}, {"items": True, "accumulation": 2}, {"workers": 1}],
    ids=lambda asked: ", ".join(asked) or "ordinary",
)
def test_a_step_does_not_wait_for_the_device(precision, asked, run_processes):
    ((found),) = run_processes(waits, precision, {**ORDINARY, **asked}, world=1)
    assert found == [0] * (STEPS - 2)


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.needs("accel-fsdp"))])
def test_nor_does_a_step_of_several_ranks(strategy, clip, run_processes):
    found = run_processes(waits, "no", {**ORDINARY, "clip": clip}, strategy, world=2)
    assert found == [[0] * (STEPS - 2)] * 2


def test_a_loss_scaler_waits_once_a_step(run_processes):
    """It must know whether to step. torch's own loop waits for that as well."""
    (found,) = run_processes(waits, "fp16", ORDINARY, world=1)
    assert found == [1] * (STEPS - 2)
