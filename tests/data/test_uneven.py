"""Inside `join_uneven_inputs(even_batches=False)` ranks get what is there, unpadded, and none waits."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_core import Accelerator, DataLoaderConfiguration


def uneven():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(torch.arange(5.0).reshape(5, 1), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    counts = []
    for even in (False, None):
        with accelerator.join_uneven_inputs([model], even_batches=even):
            seen = 0
            for batch in loader:
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                seen += len(batch)
        counts.append(seen)
    accelerator.end_training()
    return counts


@pytest.mark.needs("accel-ddp")
def test_batches_are_not_padded_inside_and_padded_again_after(run_processes):
    assert run_processes(uneven) == [[3, 4], [2, 4]]


def zipped():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model = torch.nn.Linear(1, 1)
    one, two = (DataLoader(torch.ones(5, 1), batch_size=2) for _ in range(2))
    model, one, two = accelerator.prepare(model, one, two)
    with torch.no_grad():
        rounds = sum(1 for _ in zip(one, two, strict=True))
    accelerator.backward(model(torch.ones(1, 1)).sum())  # all ranks do: nobody waits
    for batch in one:
        accelerator.backward(model(batch).sum())
        break
    accelerator.end_training()
    return rounds


@pytest.mark.needs("accel-ddp")
def test_two_loaders_that_ran_out_together_leave_training_allowed(run_processes):
    assert run_processes(zipped) == [2, 1]
