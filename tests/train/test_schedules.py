"""A schedule's length, beside the optimizer steps of the epochs that a run makes."""

from __future__ import annotations

import logging
from functools import partial

import pytest
from torch.optim import SGD
from torch.optim import lr_scheduler as torchs
from torch.utils.data import DataLoader, IterableDataset
from training_problems import batches, net

from accel_core import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin

ROWS, ROWS_IN_A_BATCH = 40, 4
LENGTH = 10
"""Batches of the loader before `prepare`; two processes have 5 each."""


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


def loader(size=ROWS_IN_A_BATCH):
    return DataLoader([x for x, _ in batches(ROWS)], batch_size=size)


def cosine(optimizer, steps):
    return torchs.CosineAnnealingLR(optimizer, steps)


def with_arguments(optimizer, **arguments):
    """As transformers makes its schedules: a function of the step, with arguments bound by name."""
    return torchs.LambdaLR(optimizer, partial(lambda step, **_: 1 / (1 + step), **arguments))


def warm_up_then(optimizer, steps):
    parts = [torchs.LinearLR(optimizer, total_iters=3), cosine(optimizer, steps)]
    return torchs.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES = {
    "OneCycleLR": lambda optimizer: torchs.OneCycleLR(optimizer, 1.0, total_steps=20),
    "CosineAnnealingLR": lambda optimizer: cosine(optimizer, 20),
    "PolynomialLR": lambda optimizer: torchs.PolynomialLR(optimizer, total_iters=20),
    "LambdaLR": lambda optimizer: with_arguments(optimizer, num_warmup_steps=2, num_training_steps=20),
    "phases": lambda optimizer: with_arguments(
        optimizer, num_warmup_steps=2, num_stable_steps=10, num_decay_steps=8
    ),
    "SequentialLR": lambda optimizer: warm_up_then(optimizer, 17),
    "a part": lambda optimizer: warm_up_then(optimizer, 20),
    "not whole": lambda optimizer: cosine(optimizer, 23),
    "not told": lambda optimizer: torchs.StepLR(optimizer, 20),
}


class Told(logging.Handler):
    """The warnings of `prepare` about schedules, of this process."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("accel_core").addHandler(self)

    def emit(self, record):
        if "optimizer steps long" in record.getMessage():
            self.texts.append(record.getMessage())

    def stop(self):
        logging.getLogger("accel_core").removeHandler(self)
        return self.texts


def told(schedule, *, steps=None, earlier=(), more=(), together=True, stepped=1, **options):
    """The warnings about one schedule, made before its loader is prepared, and what explain() says of it."""
    kind = type("Mine", (Accelerator,), {"scheduler_steps": stepped})
    accelerator, heard = kind(cpu=True, **options), Told()
    model, data = net(), loader()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULES[schedule](optimizer) if steps is None else cosine(optimizer, steps)
    for each in earlier:
        accelerator.prepare(each)
    if together:
        accelerator.prepare(model, optimizer, scheduler, *more, data)
    else:
        data = accelerator.prepare(data)
        accelerator.prepare(model, optimizer, scheduler, *more, data)
    epochs = [line for line in accelerator.explain().splitlines() if "if it steps with the optimizer" in line]
    accelerator.end_training()
    return heard.stop(), epochs


def of_each_schedule():
    return {schedule: told(schedule) for schedule in SCHEDULES}


@pytest.mark.needs("accel-ddp")
def test_a_schedule_of_whole_epochs_before_prepare_is_one_warning_on_rank_0(run_processes):
    first, second = run_processes(of_each_schedule)

    warned = {schedule: len(texts) for schedule, (texts, _) in first.items()}
    assert warned == dict.fromkeys(SCHEDULES, 1) | {"not whole": 0, "not told": 0}
    assert not any(texts for texts, _ in second.values())
    (text,) = first["OneCycleLR"][0]
    assert text.endswith(
        "the OneCycleLR is 20 optimizer steps long, 2 epoch(s) of its loader before prepare and 4 now: 2"
        " processes share the batches of an epoch, and schedulers step once per optimizer step; prepare the"
        " loader first, loader = accelerator.prepare(loader), and then make the scheduler for 2 *"
        " len(loader) steps"
    )
    assert "the SequentialLR is 20 optimizer" in first["SequentialLR"][0][0]
    assert "the CosineAnnealingLR is 20 optimizer" in first["a part"][0][0]


@pytest.mark.needs("accel-ddp")
def test_explain_gives_the_epochs_of_each_schedule_whose_length_is_told(run_processes):
    found, _ = run_processes(of_each_schedule)

    ends, condition = "steps ends after", ", if it steps with the optimizer"
    assert found["OneCycleLR"][1] == [f"  OneCycleLR of 20 {ends} 4 epoch(s){condition}"]
    assert found["not whole"][1] == [f"  CosineAnnealingLR of 23 {ends} 4.6 epoch(s){condition}"]
    assert found["phases"][1] == [f"  LambdaLR of 20 {ends} 4 epoch(s){condition}"]
    assert found["SequentialLR"][1] == [
        f"  SequentialLR of 20 {ends} 4 epoch(s){condition}",
        f"  LinearLR of 3 {ends} 0.6 epoch(s){condition}",
        f"  CosineAnnealingLR of 17 {ends} 3.4 epoch(s){condition}",
    ]
    assert found["not told"][1] == []


def windows(**options):
    return {"gradient_accumulation_plugin": GradientAccumulationPlugin(**options)}


def with_accumulation():
    """Windows of 4: 10 batches make 3 optimizer steps, and the 5 of a rank 2."""
    return [told("cosine", steps=steps, gradient_accumulation_steps=4) for steps in (6, 8, 5)]


@pytest.mark.needs("accel-ddp")
def test_epochs_are_counted_in_optimizer_steps(run_processes):
    rounded_up, not_whole, rounded_down = run_processes(with_accumulation)[0]

    assert "6 optimizer steps long, 2 epoch(s) of its loader before prepare and 3 now" in rounded_up[0][0]
    assert rounded_up[0][0].endswith("for 2 * math.ceil(len(loader) / 4) steps")
    assert rounded_up[1][0].endswith("ends after 3 epoch(s), if it steps with the optimizer")
    assert "5 optimizer steps long, 2 epoch(s) of" in rounded_down[0][0]  # 2 * 10 // 4, as programs write
    assert not_whole[0] == []


def in_silence():
    split = DataLoaderConfiguration(split_batches=True)
    each = windows(num_steps=1, adjust_scheduler=False)
    return {
        "the loader was prepared before": told("OneCycleLR", together=False),
        "batches are split": told("OneCycleLR", dataloader_config=split),
        "the program steps it": told("OneCycleLR", step_scheduler_with_optimizer=False),
        "it steps in each micro-batch": told("OneCycleLR", **each),
        "it steps once per process": told("OneCycleLR", stepped=2),
        "the training's loader, which is longer, was prepared before": told(
            "cosine", steps=20, earlier=[loader(1)]
        ),
        "it may be for data without length": told("OneCycleLR", more=[DataLoader(Stream())]),
    }


@pytest.mark.needs("accel-ddp")
def test_there_is_no_warning_where_the_schedule_may_be_right(run_processes):
    for found in run_processes(in_silence):
        assert {case: texts for case, (texts, _) in found.items() if texts} == {}
    once_per_process = found["it steps once per process"][1]
    assert "ends after 2 epoch(s)" in once_per_process[0]
    assert found["the program steps it"][1] == []


def test_one_process_is_silent(accelerator):
    heard, model = Told(), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer, SCHEDULES["OneCycleLR"](optimizer), loader())

    assert heard.stop() == []
    assert (
        "  OneCycleLR of 20 steps ends after 2 epoch(s), if it steps with the optimizer"
        in accelerator.explain()
    )
