"""Ranks that part ways before an operation of all: each hears which operation waits, and for whom."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from accel_core import Accelerator, InitProcessGroupKwargs
from accel_core.errors import CheckpointError, CollectiveError


def trainer(**options):
    accelerator = Accelerator(device="cpu", **options)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def said_by(action):
    try:
        action()
    except (CheckpointError, CollectiveError) as error:
        return str(error)
    return "nothing"


def save_on_one_rank_while_the_other_gathers(folder):
    accelerator, _, _ = trainer(kwargs_handlers=[InitProcessGroupKwargs(timeout=5)])
    if accelerator.process_index == 0:
        return said_by(lambda: accelerator.save_state(folder))
    return said_by(lambda: accelerator.gather(torch.ones(1)))


def save_on_one_and_load_on_the_other(folder):
    accelerator, _, _ = trainer()
    if accelerator.process_index == 0:
        return said_by(lambda: accelerator.save_state(folder))
    return said_by(lambda: accelerator.load_state(folder))


class Counter:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def save_what_one_rank_alone_registered(folder):
    accelerator, _, _ = trainer()
    if accelerator.process_index == 1:
        accelerator.register_for_checkpointing(Counter())
    return said_by(lambda: accelerator.save_state(folder))


def prepare_models_of_other_dtypes(strategy):
    accelerator = Accelerator(device="cpu", strategy=strategy)
    model = nn.Linear(2, 1, dtype=(torch.float32, torch.float64)[accelerator.process_index])
    return said_by(lambda: accelerator.prepare(model))


def prepare_other_objects(what):
    accelerator = Accelerator(device="cpu")
    first, model = accelerator.process_index == 0, nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    part = Subset(range(4), [0, 2] if first else [1, 3])
    objects: dict[str, list[object]] = {
        "optimizer": [model, optimizer] if first else [model],
        "size": [model if first else nn.Linear(2, 2)],
        "rate": [model, torch.optim.SGD(model.parameters(), lr=0.1 if first else 0.2)],
        "schedule": [model, optimizer, *([schedule] if first else ())],
        "loader": [model, optimizer, *([DataLoader(range(4))] if first else ())],
        "name": [model, optimizer],
        "length": [model, DataLoader(range(4 if first else 3))],
        "split": [model, DataLoader(part)],
        "split, in another": [model, DataLoader(Subset(part, [0, 1]))],
        "split, joined": [model, DataLoader(ConcatDataset([part, part]))],
        "split, without a model": [DataLoader(part)],
        "schedule, without a model": [schedule] if first else [],
    }
    if what == "schedule, without a model":
        accelerator.prepare(model, optimizer)
    name = f"unit of rank {accelerator.process_index}" if what == "name" else None
    return said_by(lambda: accelerator.prepare(*objects[what], name=name))


class Streamlike(Dataset):
    """Has samples for a sampler, and no length yet."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        raise self.error

    def __getitem__(self, index):
        return index


def prepare_data_without_length(error):
    accelerator = Accelerator(device="cpu")
    loader = DataLoader(Streamlike(error), 2, sampler=range(8))
    _, loader = accelerator.prepare(nn.Linear(2, 1), loader)
    return [batch.tolist() for batch in loader]


def prepare_an_optimizer_later_on_one():
    accelerator = Accelerator(device="cpu")
    model = accelerator.prepare(nn.Linear(2, 1))
    if accelerator.process_index == 0:
        return said_by(lambda: accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)))
    return said_by(lambda: accelerator.save_state("nowhere"))


def interrupted_on_one(operation, folder):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    accelerator, model, optimizer = trainer()
    try:
        for step in range(100):
            with accelerator.accumulate(model):
                loss = model(torch.ones(1, 2)).sum()
                if accelerator.process_index and step == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if operation == "gather":
                accelerator.gather(loss.detach())
            elif operation == "save_state":
                accelerator.save_state(folder)
    except KeyboardInterrupt:
        return "interrupted"
    except (CollectiveError, RuntimeError):
        return "failed"
    return "nothing"


pytestmark = pytest.mark.needs("accel-ddp")


def test_a_save_on_one_rank_alone_names_what_the_other_calls(tmp_path, run_processes):
    saves, gathers = run_processes(save_on_one_rank_while_the_other_gathers, str(tmp_path / "ck"))

    assert saves.startswith("save_state or load_state: ranks make different calls\n")
    listed = "\n  rank 0: save_state or load_state\n  rank 1: gather of "
    assert listed in saves
    assert listed in gathers
    assert not (tmp_path / "ck").exists()


@pytest.mark.full
def test_a_save_against_a_load_is_shown_to_both(tmp_path, run_processes):
    said = run_processes(save_on_one_and_load_on_the_other, str(tmp_path / "ck"))

    assert said[0] == said[1]
    assert "  rank 0: save_state: collect\n  rank 1: load_state: look" in said[0]


@pytest.mark.full
def test_what_one_rank_alone_registered_is_not_left_out_of_a_save(tmp_path, run_processes):
    said = run_processes(save_what_one_rank_alone_registered, str(tmp_path / "ck"))

    assert said[0] == said[1]
    assert "  rank 0: 0\n  rank 1: 1\n" in said[0]


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_models_of_other_dtypes_are_not_prepared(strategy, run_processes):
    said = run_processes(prepare_models_of_other_dtypes, strategy)

    assert said[0] == said[1]
    assert "rank 0: prepare of Linear (float32, 3 parameters)\n" in said[0]
    assert "rank 1: prepare of Linear (float64, 3 parameters)\n" in said[0]


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("optimizer", [", SGD (", "Linear (float32, 3 parameters)\n"]),
        ("size", ["Linear (float32, 3 parameters)\n", "Linear (float32, 6 parameters)\n"]),
        ("rate", [" lr=0.1,", " lr=0.2,"]),
        ("schedule", [", StepLR", "SGD"]),
        ("loader", [", 1 dataloader(s)", "SGD"]),
        ("name", [", 'unit of rank 0'", ", 'unit of rank 1'"]),
        ("length", [", 4 samples\n", ", 3 samples\n"]),
        ("split", [", 2 samples chosen by indices "] * 2),
        ("split, in another", [", 2 samples chosen by indices "] * 2),
        ("split, joined", [", 4 samples chosen by indices "] * 2),
        ("split, without a model", [" of 1 dataloader(s), 2 samples chosen by indices "] * 2),
        ("schedule, without a model", [" of StepLR\n", "prepare\n"]),
    ],
)
def test_objects_that_differ_between_ranks_are_not_prepared(what, found, run_processes):
    said = run_processes(prepare_other_objects, what)

    assert said[0] == said[1]
    lines = f"{said[0]}\n".splitlines(keepends=True)
    for rank in (0, 1):
        (line,) = [line for line in lines if line.startswith(f"  rank {rank}: prepare")]
        assert ("Linear (float32, " in line) == (not what.endswith("without a model"))
        assert found[rank] in line


@pytest.mark.full
@pytest.mark.parametrize("error", [AttributeError("no file"), RuntimeError("not open")])
def test_data_whose_length_raises_is_prepared_as_its_sampler_says(error, run_processes):
    """torch's loader asks the sampler alone."""
    assert run_processes(prepare_data_without_length, error) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.full
def test_an_optimizer_that_one_rank_alone_prepares_later_is_not_prepared(run_processes):
    said = run_processes(prepare_an_optimizer_later_on_one)

    assert said[0] == said[1]
    assert "  rank 0: prepare of SGD (" in said[0]
    assert "  rank 1: save_state or load_state\n" in said[0]


@pytest.mark.parametrize("operation", ["backward", "gather", "save_state"])
@pytest.mark.by_default
def test_a_rank_that_is_interrupted_in_its_loop_ends_the_others(tmp_path, operation, run_processes):
    assert run_processes(interrupted_on_one, operation, str(tmp_path / "ck")) == ["failed", "interrupted"]
