"""Loaders that know their own position: torchdata's, asked for by the config or given by the user."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from reader_worlds import Numbers, Stream, plain, prepared, real, rounds, world
from torch.utils.data import DataLoader, IterableDataset

from accel_core import Accelerator, CheckpointError, ConfigError, DataLoaderConfiguration, skip_first_batches
from accel_core.data.loader import prepare_loader
from accel_core.data.sharding import Sharding
from accel_core.data.stateful import ShardedIterable

pytestmark = [
    pytest.mark.needs("torchdata"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
]

stateful = pytest.importorskip("torchdata.stateful_dataloader")


class Walk(IterableDataset):
    """A random walk. Its state is where it is; `steps` counts what this object has walked."""

    def __init__(self, length):
        self.length, self.steps = length, 0
        self.generator = torch.Generator().manual_seed(5)
        self.at, self.place, self.told = 0, 0, False

    def __iter__(self):
        if not self.told:
            self.at, self.place = 0, 0
        self.told = False
        while self.at < self.length:
            self.at, self.steps = self.at + 1, self.steps + 1
            self.place += int(torch.randint(1, 9, (), generator=self.generator))
            yield self.place

    def state_dict(self):
        return {"at": self.at, "place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.at, self.place, self.told = state["at"], state["place"], True
        self.generator.set_state(state["generator"])


class Steps:
    """An iterator that knows its position."""

    def __init__(self, length):
        self.length, self.at = length, 0

    def __next__(self):
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def __iter__(self):
        return self

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Iterating(Stream):
    """A dataset whose iterator knows its position."""

    def __iter__(self):
        return Steps(self.length)


DATA = {"map": Numbers, "walk": Walk, "iterator": Iterating, "plain iterable": Stream}


def loaders(kind, length=23, *, workers=0, given=False, **options):
    """make(reader), and the options of the run, for torchdata's loader: given, or asked for."""

    def make(_):
        torch.manual_seed(1)
        shuffle = {"shuffle": True} if kind == "map" else {}
        chosen = stateful.StatefulDataLoader if given else DataLoader
        return chosen(DATA[kind](length), 2, num_workers=workers, collate_fn=plain, **shuffle)

    return make, {"use_stateful_dataloader": not given, **options}


def rest(readers, iterators):
    found = []
    while True:
        batches = [next(iterator, None) for iterator in iterators]
        if all(batch is None for batch in batches):
            return real(found)
        found.append((batches, readers[0].remainder, None))


@pytest.mark.parametrize(("readers", "states"), [(1, 0), (2, 3)])
def test_states_are_kept_only_of_what_is_read_before_its_time(monkeypatch, readers, states):
    asked, walk = [], Walk(8)
    monkeypatch.setattr(walk, "state_dict", lambda: asked.append(walk.at) or {})
    sharded = ShardedIterable(walk, Sharding(readers=readers), 2, everyone=True, stateful=True)
    assert sum(len(shares) for shares, _ in sharded) == 4
    assert len(asked) == states


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", DATA)
def test_an_epoch_goes_on_where_it_was(kind, dispatch, given, workers):
    readers = 2 if dispatch or not given else 1
    make, options = loaders(kind, workers=workers, given=given, dispatch_batches=dispatch)
    old = prepared(make, readers, **options)
    _, iterators = rounds(old, 3)
    states, stream = [loader.state_dict() for loader in old], torch.get_rng_state()
    expected = rest(old, iterators), real(rounds(old)[0]) if kind != "walk" else None

    torch.manual_seed(77)
    new = prepared(make, readers, **options)
    for loader, state in zip(new, states, strict=True):
        loader.load_state_dict(state)
    torch.set_rng_state(stream)
    found, _ = rounds(new)
    # A walk goes on from its generator in the next epoch; where its workers are new ones, they begin anew.
    assert (real(found), real(rounds(new)[0]) if kind != "walk" else None) == expected
    assert found[-1][2] == [True] * readers
    assert states[0]["kind"] == ("indexed" if kind == "map" else "stateful")


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("dispatch", [False, True])
def test_readers_get_what_they_get_from_torchs_loader(kind, readers, dispatch):
    make, options = loaders(kind, dispatch_batches=dispatch, even_batches=False)
    torchs = {**options, "use_stateful_dataloader": False}
    for _ in range(2):
        assert rounds(prepared(make, readers, **options))[0] == rounds(prepared(make, readers, **torchs))[0]


@pytest.mark.parametrize("readers", [2, 3])
def test_padding_is_marked_as_such(readers):
    make, options = loaders("iterator", 7, dispatch_batches=False)
    found, _ = rounds(prepared(make, readers, **options))
    assert {len(batch) for batches, _, _ in found for batch in batches} == {2}
    assert real(found) == list(range(7))


def test_what_was_read_is_not_read_again():
    make, options = loaders("walk", dispatch_batches=False)
    old = prepared(make, 2, **options)
    rounds(old, 4)
    new = prepared(make, 2, **options)
    for loader in new:
        loader.load_state_dict(old[0].state_dict())
    rounds(new)
    assert [loader.dataset.steps for loader in new] == [23 - 4 * 4] * 2


@pytest.mark.parametrize("kind", ["map", "iterator"])
def test_skipping_first_batches_counts_from_the_start_of_the_epoch(kind):
    make, options = loaders(kind)
    torch.manual_seed(4)
    expected = list(prepared(make, **options)[0])[3:]
    (loader,) = prepared(make, **options)
    torch.manual_seed(1)
    skipped = skip_first_batches(loader, 3)
    found = list(itertools.islice(skipped, 2))
    assert found == expected[:2]
    (again,) = prepared(make, **options)
    again.load_state_dict(loader.state_dict())
    assert list(again) == expected[2:]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"readers": 3}, r"\(2, 2, 0, False\), here \(3, 2, 0, False\)"),
        ({"workers": 2}, r"\(2, 2, 0, False\), here \(2, 2, 2, False\)"),
        ({"dispatch_batches": True}, "saved in the middle"),
    ],
)
def test_changes_that_it_does_not_survive_are_refused(change, says):
    make, options = loaders("iterator", dispatch_batches="dispatch_batches" in change)
    old = prepared(make, 2, **options)
    rounds(old, 2)
    readers = change.pop("readers", 2)
    make, options = loaders("iterator", workers=change.pop("workers", 0), dispatch_batches=False)
    loader = prepared(make, readers, **options)[1]
    with pytest.raises(CheckpointError, match=says):
        loader.load_state_dict(old[1].state_dict())


def test_without_torchdata_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    make, options = loaders("map")
    with pytest.raises(ConfigError, match=r"pip install './\.\[stateful\]'"):
        prepared(make, **options)


def test_a_loader_of_the_users_own_class_is_not_turned_into_another():
    class Own(DataLoader):
        pass

    (run,) = world(use_stateful_dataloader=True)
    with pytest.raises(ConfigError, match="Own is a DataLoader of your own"):
        prepare_loader(Own(Numbers(3)), run)


def train(folder, resume):
    options = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    loader = accelerator.prepare(DataLoader(Walk(23), 2))
    seen = []
    if resume:
        accelerator.load_state(folder)
    for number, batch in enumerate(loader, start=1):
        seen += accelerator.gather_for_metrics(batch).tolist()
        if number == 3 and not resume:
            accelerator.save_state(folder)
    accelerator.end_training()
    return seen


def test_a_checkpoint_holds_its_state(tmp_path, run_processes):
    whole = run_processes(train, str(tmp_path / "saved"), False)
    assert [seen[12:] for seen in whole] == run_processes(train, str(tmp_path / "saved"), True)
    assert len(whole[0]) == 23
