"""Batches that are read before the loop trains on them: the loader's place is that of the batch in use."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import islice

import pytest
import torch
from reader_worlds import Numbers, Stream, numbers, plain, prepared, world
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_core import Accelerator, DataLoaderConfiguration
from accel_core.data import prefetch
from accel_core.data.loader import prepare_loader


def saved(loader):
    return json.loads(json.dumps(loader.state_dict()))


def windows(loader, size):
    """Windows of so many batches, each as a list of functions that hand a batch out."""
    with closing(loader.host_batches()) as batches:
        while window := [hand_out for _, hand_out in islice(batches, size)]:
            yield window
            batches.settle()


def places(loader):
    return loader.last, loader.remainder, loader.place


LOADERS = {
    "map": numbers(7, 2, seed=3),
    "workers": numbers(7, 2, seed=3, num_workers=1),
    "iterable": lambda _: DataLoader(Stream(7), 2, collate_fn=plain),
}


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_batches_and_places_are_those_of_a_plain_loop(make, readers):
    options = {"dispatch_batches": False}
    one, other = prepared(make, readers, **options)[0], prepared(make, readers, **options)[0]
    for size in (1, 3):
        expected = [(batch, places(one)) for batch in one]
        found = [(hand_out(), places(other)) for window in windows(other, size) for hand_out in window]
        assert found == expected
        assert places(other) == places(one)
        assert other.epoch == one.epoch


def test_reading_moves_no_place_and_reads_no_further_than_asked():
    read = []

    class Counting(Numbers):
        def __getitem__(self, index):
            read.append(index)
            return index

    (loader,) = prepared(lambda _: DataLoader(Counting(8), 2, collate_fn=plain))
    with closing(loader.host_batches()) as batches:
        (first, hand_out), _ = islice(batches, 2)
        assert read == [0, 1, 2, 3]
        assert (first, places(loader)) == ([0, 1], (False, -1, " in batch 0 of epoch 0"))
        assert hand_out() == [0, 1]
        assert places(loader) == (False, -1, " in batch 1 of epoch 0")


def test_a_window_may_be_handed_out_again():
    (loader,) = prepared(numbers(6, 2))
    for window in windows(loader, 2):
        first = [(hand_out(), places(loader)) for hand_out in window]
        assert [(hand_out(), places(loader)) for hand_out in window] == first


def test_batches_are_placed_as_they_are_handed_out(monkeypatch):
    moved = []

    def move(batch, device, non_blocking):
        moved.append(batch)
        return [-number for number in batch]

    monkeypatch.setattr(prefetch, "send_to_device", move)
    (run,) = world(device="meta")
    loader = prepare_loader(numbers(4, 2)(0), run)
    with closing(loader.host_batches()) as batches:
        (first, hand_out), _ = batches
        assert (first, moved) == ([0, 1], [])
        assert (hand_out(), moved) == ([0, -1], [[0, 1]])


def test_batches_that_a_plugin_reads_are_placed_already():
    def wrap(batches, topology):
        return ([-number for number in batch] for batch in batches)

    (run,) = world(device="meta", wrap=wrap)
    loader = prepare_loader(numbers(4, 2, num_workers=1)(0), run)
    with closing(loader.host_batches()) as batches:
        found = [(batch, hand_out(), loader.last) for batch, hand_out in batches]
    assert found == [([0, -1], [0, -1], False), ([-2, -3], [-2, -3], True)]


class Walk(IterableDataset):
    """Numbers of a dataset that knows its position."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 9:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def walking(_):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(Walk(), 1, collate_fn=plain)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("make", [numbers(9, 1, seed=3), walking], ids=["map", "stateful"])
@pytest.mark.parametrize("done", range(1, 9))
def test_a_save_inside_a_window_resumes_at_the_windows_start(make, done):
    (whole,) = prepared(make)
    order = [batch for (batch,) in whole]
    (loader,) = prepared(make)
    handed_out = []
    for window in windows(loader, 4):
        for hand_out in window:
            handed_out += hand_out()
            if len(handed_out) == done:
                state = saved(loader)
    (again,) = prepared(make)
    again.load_state_dict(state)
    assert handed_out == order
    assert [batch for (batch,) in again] == order[(done - 1) // 4 * 4 :]


def test_a_save_after_the_last_window_is_settled_resumes_with_the_next_epoch():
    (loader,) = prepared(numbers(6, 2, seed=3))
    with closing(loader.host_batches()) as batches:
        for _, hand_out in [*batches]:
            hand_out()
        assert not saved(loader)["ended"]
        batches.settle()
        assert saved(loader)["ended"]
    assert loader.epoch == 1


def test_a_loop_that_is_left_goes_on_where_it_was_settled():
    (loader,) = prepared(numbers(12, 2))
    for number, window in enumerate(windows(loader, 2)):
        for hand_out in window:
            hand_out()
        if number == 1:
            break
    (again,) = prepared(numbers(12, 2))
    again.load_state_dict(saved(loader))
    assert list(again) == [[4, 5], [6, 7], [8, 9], [10, 11]]


def test_the_loader_is_active_until_it_is_closed():
    (run,) = world()
    loader = prepare_loader(numbers(4, 2)(0), run)
    batches = loader.host_batches()
    assert run.active_loaders == []
    held = [*batches]
    assert run.active_loaders == [loader]
    for _, hand_out in held:
        hand_out()
    batches.close()
    batches.close()
    assert run.active_loaders == []


def metrics(dispatch, size):
    options = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    _, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.arange(10.0), 1))
    gathered = []
    for window in windows(loader, size):
        for hand_out in window:
            gathered += accelerator.gather_for_metrics(hand_out()).tolist()
    accelerator.end_training()
    return gathered


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_metrics_count_each_sample_once(world, dispatch, run_processes):
    for size in (3, 4):
        assert run_processes(metrics, dispatch, size, world=world) == [[*map(float, range(10))]] * world
