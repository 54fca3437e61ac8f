"""`explain()` says what happens when: the window, the traffic, the effective batch, an epoch's steps."""

from __future__ import annotations

import pytest
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset
from training_problems import batches, net

from accel_core import Accelerator, GradientAccumulationPlugin


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


def explained(accelerator, samples=40):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    data = DataLoader([x for x, _ in batches(samples)], batch_size=4)
    accelerator.prepare(model, optimizer, StepLR(optimizer, 1), data, net(1), DataLoader(Stream()))
    return accelerator.explain().splitlines()


def test_one_process_without_accumulation(accelerator):
    lines = explained(accelerator)
    assert lines[lines.index("  data: reader 0 of 1") + 1 :] == [
        "unit unit0 (single): Sequential, SGD, StepLR",
        "  an optimizer step: after 1 micro-batch of accumulate(...)",
        "  loss: taken as it is; in accelerator.windows(items=...) by the items of all ranks",
        "  gradients: in this process alone",
        "  schedulers: one step for each optimizer step that was applied, whatever the number of processes",
        "unit unit1 (single): Sequential",
        "  does not train",
        "loader 0: an epoch has 10 batches of 4 samples over 1 reader",
        "  trained on, an epoch makes 10 optimizer steps of 4 samples",
        "loader 1: batches of 1 samples over 1 reader; how many an epoch has is not known",
    ]


def test_accumulation_and_the_tail_of_an_epoch(accelerator_of):
    text = "\n".join(explained(accelerator_of(gradient_accumulation_steps=4)))
    assert "an optimizer step: after 4 micro-batches of accumulate(...), fewer at the end of a loader" in text
    assert "an epoch makes 3 optimizer steps of 16 samples, the last of 2 micro-batches" in text
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False, adjust_scheduler=False)
    lines = explained(accelerator_of(gradient_accumulation_plugin=plugin))
    assert "  schedulers: one step for each micro-batch, whatever the number of processes" in lines
    assert lines[-2] == (
        "  trained on, an epoch makes 2 optimizer steps of 16 samples,"
        " 2 micro-batches left for the next epoch's first"
    )


def test_what_is_scaled_and_what_is_left_to_the_user(accelerator_of):
    text = "\n".join(explained(accelerator_of(mixed_precision="fp16", step_scheduler_with_optimizer=False)))
    assert "loss scale: one for the run, updated once a window" in text
    assert "schedulers: stepped by you" in text


def between(each_batch):
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each_batch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    lines = explained(accelerator)
    accelerator.end_training()
    return [line for line in lines if "reduced" in line or "optimizer steps" in line]


@pytest.mark.needs("accel-ddp")
def test_who_synchronises_between_processes(run_processes):
    when = ("of a step's last micro-batch only", "in each backward")
    for each_batch in (False, True):
        for gradients, epoch in run_processes(between, each_batch):
            assert gradients.startswith("  gradients: reduced between 2 processes in ")
            assert gradients.endswith(when[each_batch])
            assert epoch.startswith("  trained on, an epoch makes 3 optimizer steps of 16 samples")
