"""Batches are put on the device, the next one while the user has this one; positions do not notice."""

from __future__ import annotations

import pytest
import torch
from reader_worlds import Numbers, Stream, plain, prepared, world
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, DataLoaderConfiguration
from accel_core.data import loader as loading
from accel_core.data import prefetch
from accel_core.data.loader import prepare_loader
from accel_core.storage.tensor_bytes import can_pin


def recorded(monkeypatch, data, *, workers, **options):
    """What happens, in order: a batch is moved, a batch is handed out (with what the loader then says)."""
    events = []

    class Stream:
        device = torch.device("meta")

        def __enter__(self):
            events.append("beside")

        def __exit__(self, *_):
            pass

        def record_event(self):
            return "moved"

        def wait_event(self, event):
            events.append("waits")

        def wait_stream(self, stream):
            events.append("follows")

    def move(batch, device, non_blocking):
        events.append(f"moves {batch}")
        return batch

    monkeypatch.setattr(prefetch, "_stream", lambda _: Stream())
    computing = Stream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: computing)
    monkeypatch.setattr(prefetch, "send_to_device", move)
    (run,) = world(device="meta", **options)
    loader = prepare_loader(DataLoader(data, 2, num_workers=workers, collate_fn=plain), run)
    events.extend((batch, loader.last, loader.state_dict()["consumed"]) for batch in loader)
    return [event for event in events if event not in ("beside", "waits", "follows")], events


def test_the_next_batch_moves_beside_the_computing_before_this_one_is_handed_out(monkeypatch):
    found, everything = recorded(monkeypatch, Numbers(5), workers=1)
    assert found == [
        "moves [0, 1]",
        "moves [2, 3]",
        ([0, 1], False, 2),
        "moves [4]",
        ([2, 3], False, 4),
        ([4], True, 5),
    ]
    aside = ["follows", "beside"]
    assert [each for each in everything if each in (*aside, "waits")] == [
        *aside, *aside, "waits", *aside, "waits", "waits", "follows"
    ]  # fmt: skip


class Queue:
    """A stream that knows what it has waited for: names of streams, by the number of their kernels then."""

    device = torch.device("meta")

    def __init__(self, name):
        self.name, self.kernels, self.waited = name, 0, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record_event(self):
        return "moved"

    def wait_event(self, event):
        pass

    def wait_stream(self, other):
        self.waited[other.name] = other.kernels


@pytest.mark.parametrize("left", ["at its end", "early"])
def test_memory_of_batches_waits_for_each_stream_that_has_read_them(monkeypatch, left):
    aside, first, second = Queue("aside"), Queue("first"), Queue("second")
    current = [first]
    monkeypatch.setattr(prefetch, "_stream", lambda _: aside)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current[0])
    monkeypatch.setattr(prefetch, "send_to_device", lambda batch, device, non_blocking: batch)
    (run,) = world(device="meta")
    loader = prepare_loader(DataLoader(Numbers(8), 2, num_workers=1, collate_fn=plain), run)
    for number, _ in enumerate(loader):
        current[0].kernels += 1
        if number == 1:
            current[0] = second
        if number == 2 and left == "early":
            break
    # Each has been waited for as a whole, before a loop on any stream gets this memory.
    assert aside.waited == {"first": first.kernels, "second": second.kernels}


def test_an_iterables_last_batch_is_told_though_it_was_moved_before(monkeypatch):
    found, _ = recorded(monkeypatch, Stream(4), workers=1)
    assert found == ["moves [0, 1]", "moves [2, 3]", ([0, 1], False, 1), ([2, 3], True, 2)]


def test_what_is_read_in_this_process_is_not_read_before_its_time(monkeypatch):
    found, _ = recorded(monkeypatch, Numbers(4), workers=0)
    assert found == ["moves [0, 1]", ([0, 1], False, 2), "moves [2, 3]", ([2, 3], True, 4)]


def test_a_device_that_torch_does_not_compute_on_has_no_stream():
    assert prefetch._stream(torch.device("meta")) is None


def on_a_simulated_device(workers):
    from accel_testing.simulated.device import simulate

    simulate("sim")
    options = DataLoaderConfiguration(non_blocking=True)
    accelerator = Accelerator(device="sim", dataloader_config=options)
    data = TensorDataset(torch.arange(7.0))
    loader = accelerator.prepare(DataLoader(data, 2, num_workers=workers))
    seen = []
    for (batch,) in loader:
        assert batch.device == accelerator.device
        seen += accelerator.gather_for_metrics(batch).tolist()
    accelerator.end_training()
    return seen


@pytest.mark.simulated
@pytest.mark.parametrize("workers", [0, 1])
def test_on_a_device_with_streams(workers, run_processes):
    assert run_processes(on_a_simulated_device, workers, world=1) == [[float(each) for each in range(7)]]


class Carrier(list):
    """What a plugin's `wrap_dataloader` may give."""


def carried(monkeypatch, marks=(), workers=1):
    """(batches of a loader that a plugin brings to the device, what it was given, points marked)."""
    given, points = [], []

    def wrap(loader, topology):
        given.append(topology.readers)
        found = Carrier(-batch for batch in loader)
        found.marks = frozenset(marks)
        return found

    monkeypatch.setattr(prefetch, "send_to_device", lambda batch, device, non_blocking: batch)
    (run,) = world(device="meta", wrap=wrap, mark_step=points.append)
    loader = prepare_loader(DataLoader(Numbers(4), 2, num_workers=workers), run)
    return [batch.tolist() for batch in loader], given, points


def test_a_plugin_brings_the_batches_of_loaders_with_workers(monkeypatch):
    assert carried(monkeypatch) == ([[0, -1], [-2, -3]], [1], ["batch", "batch"])


def test_a_plugins_loader_that_marks_batches_is_left_alone(monkeypatch):
    assert carried(monkeypatch, marks=["batch"])[2] == []


def test_a_plugin_does_not_read_ahead_in_this_process(monkeypatch):
    assert carried(monkeypatch, workers=0) == ([[0, 1], [2, 3]], [], ["batch", "batch"])


def test_nothing_is_done_on_a_cpu():
    (loader,) = prepared(lambda _: DataLoader(Numbers(4), 2, num_workers=1))
    assert loader._placement is None


def test_nothing_is_pinned_for_a_device_that_is_not_torchs_accelerator():
    assert not can_pin(torch.device("meta"))


def test_copies_of_pinned_batches_are_not_waited_for(monkeypatch):
    waits = []
    monkeypatch.setattr(loading, "can_pin", lambda device: device.type == "meta")

    def move(batch, device, non_blocking):
        waits.append(not non_blocking)

    monkeypatch.setattr(prefetch, "send_to_device", move)
    (run,) = world(device="meta")
    for pinned in (True, False):
        loader = prepare_loader(DataLoader(Numbers(4), 2, pin_memory=pinned), run)
        list(loader._placement.all(iter(["batch"])))
    assert waits == [False, True]
