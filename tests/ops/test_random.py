"""Seeding: every stream, per rank where asked."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from rank_processes import ranks

from accel_core import ConfigError, RandomStream, Topology, World, set_seed
from accel_core.checkpoint.defaults import BaseState
from accel_core.distributed.process_group import Alone
from accel_core.distributed.random import synchronize_rng_state, synchronize_rng_states
from accel_testing import Recorder

np = pytest.importorskip("numpy")


def drawn():
    return random.random(), np.random.random(), torch.rand(()).item()


def test_a_seed_may_be_a_number_of_numpy_or_torch():
    set_seed(3)
    first = drawn()
    for seed in (np.int64(3), torch.tensor(3)):
        set_seed(seed)
        assert drawn() == first


def test_the_same_seed_draws_the_same_from_every_stream():
    set_seed(3)
    first = drawn()
    set_seed(3)
    assert drawn() == first
    set_seed(4)
    assert all(a != b for a, b in zip(drawn(), first, strict=True))


def test_a_device_specific_seed_adds_the_rank(monkeypatch):
    set_seed(5)
    expected = drawn()
    # A run that an earlier test dropped without an end lives on until it is collected.
    monkeypatch.setattr("accel_core.distributed.random.live_runs", frozenset())
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    set_seed(3, device_specific=True)
    assert drawn() == expected


def test_a_run_seeds_the_streams_of_its_plugins():
    seeds = []
    stream = RandomStream(torch.get_rng_state, torch.set_rng_state, seeds.append)
    run = SimpleNamespace(
        world=World(rank=3, size=4),
        topology=Topology(reader=3, readers=4),
        units=(),
        hooks=SimpleNamespace(random_streams=lambda: {"own": stream}),
    )
    set_seed(10, device_specific=True, run=run)
    assert seeds == [13]


def test_deterministic_algorithms_are_asked_of_torch():
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def fails(state):
    raise RuntimeError("the state is of another device")


STREAM = RandomStream(lambda: None, fails)


@pytest.fixture
def run():
    """One process with two streams."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        collectives=lambda dim: Alone(),
        hooks=SimpleNamespace(random_streams=lambda: {"torch": STREAM, "python": STREAM}),
    )


def test_a_stream_that_is_not_there_lists_those_that_are(run):
    with pytest.raises(ConfigError, match=r"no stream 'torhc' here\nchoose among python, torch"):
        synchronize_rng_state("torhc", run=run)
    with pytest.raises(ConfigError, match="pass generator=..."):
        synchronize_rng_state("generator", run=run)


def test_a_state_that_cannot_be_set_raises(run):
    with pytest.raises(RuntimeError, match="another device"):
        synchronize_rng_state("torch", run=run)


def synchronize(accelerator):
    rank = accelerator.process_index
    set_seed(7, device_specific=True)
    different = drawn()
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["torch", "python", "numpy", "generator"], generator)
    return different, drawn(), torch.rand(2, generator=generator).tolist()


@pytest.mark.needs("accel-ddp")
def test_synchronized_streams_draw_the_same_on_all_ranks(run_processes):
    first, second = ranks(run_processes, synchronize)
    assert first[0] != second[0]
    assert first[1:] == second[1:]


def synchronize_one(accelerator):
    set_seed(7, device_specific=True)
    synchronize_rng_state("python")
    return drawn()


@pytest.mark.needs("accel-ddp")
def test_synchronizing_a_stream_leaves_the_others_alone(run_processes):
    first, second = ranks(run_processes, synchronize_one)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, False]


# -- of several devices ----------------------------------------------------------------------------


@pytest.fixture
def three(monkeypatch):
    """torch.cuda as on a machine with three devices; their states are their numbers."""
    cuda = Recorder(monkeypatch, torch.cuda)
    cuda.answers("device_count", 3)
    cuda.answers("get_rng_state", lambda device: torch.tensor([device.index], dtype=torch.uint8))
    cuda.answers("set_rng_state", None)
    return cuda


def state_on(index, *, world=1):
    state = BaseState()
    state.run = SimpleNamespace(world=World(size=world), device=torch.device("cuda", index))
    return state


def test_a_single_process_keeps_the_states_of_all_devices_that_it_may_use(three):
    streams = {name: it for name, it in state_on(1).random_streams().items() if name.startswith("cuda")}
    of_devices = {name: stream.get().item() for name, stream in streams.items()}
    for stream in streams.values():
        stream.set(stream.get())

    assert of_devices == {"cuda": 1, "cuda:0": 0, "cuda:2": 2}
    restored = [arguments for name, arguments in three.calls if name == "set_rng_state"]
    assert sorted((state.item(), device.index) for state, device in restored) == [(0, 0), (1, 1), (2, 2)]


def test_one_of_several_processes_keeps_its_own_devices_state(three):
    streams = state_on(1, world=3).random_streams()
    assert [name for name in streams if name.startswith("cuda")] == ["cuda"]
