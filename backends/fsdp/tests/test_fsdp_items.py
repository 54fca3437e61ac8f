"""Sums over items that a window has left are seen where torch keeps them apart from `parameter.grad`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from accel_core import Accelerator, AccelError
from accel_fsdp import FullyShardedDataParallelPlugin


def mixed_with_a_loss_of_means(version: int) -> str:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        plugins=[FullyShardedDataParallelPlugin(fsdp_version=version)],
    )
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    x = torch.ones(2, 4)
    with accelerator.accumulate(first, second, items=2):
        accelerator.backward(first(x).sum() + second(x).sum())
    accelerator.sync_gradients = True
    accelerator.backward(first(x).mean() + second(x).mean())
    try:
        optimizers[1].step()
    except AccelError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return ""


@pytest.mark.parametrize("version", [1, 2])
def test_those_of_two_units_join_no_means(version: int, run_processes) -> None:
    for told in run_processes(mixed_with_a_loss_of_means, version):
        assert "gradients of an earlier window were not cleared" in told
