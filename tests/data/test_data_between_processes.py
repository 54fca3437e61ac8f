"""Loaders in real processes: one order for the world, saved in one world and resumed in another."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_core import Accelerator
from accel_core.testing.processes import run_processes

pytestmark = pytest.mark.together


def shuffled():
    return DataLoader(list(range(21)), batch_size=3, shuffle=True)


def plain_epochs(count):
    torch.manual_seed(5)
    loader = shuffled()
    return [[batch.tolist() for batch in loader] for _ in range(count)]


def flat(epoch):
    return [sample for batch in epoch for sample in batch]


def read(stop_after, folder=None, *, resume=False):
    """What is gathered until `stop_after` rounds (and saved then), or from there on for two epochs."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(shuffled())
    # Ranks seeded differently, as set_seed(device_specific=True) does: the order is rank 0's.
    torch.manual_seed(5 + 100 * accelerator.process_index + 1000 * resume)
    if resume:
        accelerator.load_state(folder)
    gathered = []
    for _ in range(2):
        gathered.append([])
        for number, batch in enumerate(loader, start=1):
            gathered[-1] += accelerator.gather_for_metrics(batch).tolist()
            if number == stop_after:
                accelerator.save_state(folder)
                accelerator.end_training()
                return gathered
    accelerator.end_training()
    return gathered


@pytest.mark.parametrize("world", [1, 2])
def test_the_world_reads_what_one_process_of_plain_pytorch_reads(world):
    expected = flat(plain_epochs(1)[0])
    for first, second in run_processes(read, None, world=world):
        assert first == expected
        assert sorted(second) == sorted(expected)


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (2, 2)])
def test_an_epoch_saved_in_one_world_goes_on_in_another(tmp_path, old, new):
    before = run_processes(read, 2, str(tmp_path / "saved"), world=old)[0][0]
    for rest, following in run_processes(resumed, str(tmp_path / "saved"), world=new):
        assert before + rest == flat(plain_epochs(1)[0])
        assert sorted(following) == list(range(21))


def resumed(folder):
    return read(None, folder, resume=True)
