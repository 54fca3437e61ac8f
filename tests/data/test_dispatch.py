"""`dispatch_batches`: rank 0 reads, and every reader gets the batch that it would have read itself."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_worlds import Numbers, Ragged, Stream, numbers, plain, prepared, real, rounds
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accel_core import Accelerator, CollectiveError, DataLoaderConfiguration


class OfSize(BatchSampler):
    """A batch sampler of the user's own that states a batch size."""

    def __iter__(self):
        order = list(self.sampler)
        return (order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size))


@st.composite
def cases(draw):
    readers = draw(st.integers(2, 4))
    split = draw(st.booleans())
    return {
        "readers": readers,
        "length": draw(st.integers(0, 30)),
        "batch_size": draw(st.integers(1, 3)) * (readers if split else 1),
        "kind": draw(st.sampled_from(["map", "shuffled", "iterable", "own batches", "own sized batches"])),
        "drop_last": draw(st.booleans()),
        "split_batches": split,
        "even_batches": draw(st.booleans()),
    }


def loader_of(case):
    def make(reader):
        length, size, kind = case["length"], case["batch_size"], case["kind"]
        if kind == "iterable":
            return DataLoader(Stream(length), size, drop_last=case["drop_last"], collate_fn=plain)
        if kind == "own batches" and not case["split_batches"]:
            return DataLoader(Numbers(length), batch_sampler=Ragged(length), collate_fn=plain)
        if kind.startswith("own"):
            own = OfSize(SequentialSampler(range(length)), size, drop_last=False)
            return DataLoader(Numbers(length), batch_sampler=own, collate_fn=plain)
        seed = 3 if kind == "shuffled" and length else None
        return numbers(length, size, seed=seed, drop_last=case["drop_last"])(reader)

    return make


@settings(deadline=None, max_examples=150)
@given(case=cases())
def test_readers_get_what_they_would_have_read_themselves(case):
    options = {name: case[name] for name in ("split_batches", "even_batches")}
    themselves, dispatched = (
        prepared(loader_of(case), case["readers"], dispatch_batches=dispatch, **options)
        for dispatch in (False, True)
    )
    for _ in range(2):
        assert rounds(dispatched)[0] == rounds(themselves)[0]
    positions = [[loader.state_dict() for loader in loaders] for loaders in (dispatched, themselves)]
    for position in chain(*positions):
        del position["generators"]  # of readers that do not read, nobody asks for theirs
    assert positions[0] == positions[1]
    assert [len(loader) for loader in dispatched if case["kind"] != "iterable"] == [
        len(loader) for loader in themselves if case["kind"] != "iterable"
    ]


@settings(deadline=None, max_examples=100)
@given(case=cases(), before=st.integers(1, 6), new_readers=st.integers(1, 4))
def test_a_dispatched_epoch_goes_on_with_any_number_of_readers(case, before, new_readers):
    options = {name: case[name] for name in ("even_batches",)}
    case |= {"split_batches": False}
    (alone,) = prepared(loader_of({**case, "batch_size": 1, "drop_last": False}))
    order = [sample for batch in alone for sample in batch]
    old = prepared(loader_of(case), case["readers"], dispatch_batches=True, **options)
    first, _ = rounds(old, before)
    new = prepared(loader_of(case), new_readers, dispatch_batches=True, **options)
    for loader in new:
        loader.load_state_dict(old[0].state_dict())
    goes_on = new[0].epoch == 0  # else the epoch was over, and the next one is begun
    handed_out = real(first) + (real(rounds(new)[0]) if goes_on else [])
    assert handed_out == order[: len(handed_out)]
    missing = len(order) - len(handed_out)
    assert missing < (case["batch_size"] * max(new_readers, case["readers"]) if case["drop_last"] else 1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_workers_of_the_rank_that_reads_read(kind, workers):
    def make(_):
        data = Stream(13) if kind == "iterable" else Numbers(13)
        return DataLoader(data, 2, num_workers=workers, collate_fn=plain)

    copies = workers if kind == "iterable" else 1
    found, _ = rounds(prepared(make, 3, dispatch_batches=True))
    assert sorted(real(found)) == sorted(list(range(13)) * copies)
    assert found[-1][2] == [True] * 3


def test_iterables_are_dispatched_unless_the_user_says_no():
    class Unseeded(Stream):
        def __iter__(self):
            return iter([random.random() for _ in range(self.length)])

    def batches(**data):
        found, _ = rounds(prepared(lambda _: DataLoader(Unseeded(4), 2, collate_fn=plain), 2, **data))
        return real(found)

    class Counting(Stream):
        def __iter__(self):
            read.append(self.reader)
            return super().__iter__()

    def counted(reader):
        data = Counting(4)
        data.reader = reader
        return DataLoader(data, 2)

    for data, readers in (({}, [0]), ({"dispatch_batches": False}, [0, 1])):
        read: list[int] = []
        rounds(prepared(counted, 2, **data))
        assert read == readers
    assert len(set(batches())) == 4


def test_ranks_seeded_alike_stay_alike():
    def streams(dispatch):
        torch.manual_seed(3)
        first, second = prepared(
            lambda _: DataLoader(Numbers(8), 2, shuffle=True, collate_fn=plain), 2, dispatch_batches=dispatch
        )
        found = []
        for loader in (first, second):
            torch.manual_seed(3)
            iterator = iter(loader)
            next(iterator)
            found.append(torch.rand(()).item())
        return found

    assert len({*streams(False), *streams(True)}) == 1


# -- in real processes ------------------------------------------------------------------------------


@dataclass
class Sample:
    """A batch of a class of the user's own."""

    ids: torch.Tensor
    text: list[str]
    nothing: None = None


def rich(samples):
    """A collate function that gives everything a batch may hold; ragged from batch to batch."""
    ids = torch.tensor(samples)
    return {
        "ids": ids,
        "sample": Sample(ids.float().requires_grad_(), [str(each) for each in samples]),
        "ragged": [torch.arange(each % 3) for each in samples],
        "half": (ids.to(torch.bfloat16), None, ids.bool()),
        "transposed": torch.arange(2 * len(samples)).reshape(2, -1).T,
        "sparse": torch.eye(2).to_sparse(),
        "empty": torch.empty(0, 3),
        "large": torch.full((300, 100), float(sum(samples))),
    }


def told(batch):
    """The batch in a form that can be compared."""
    sample = batch["sample"]
    assert sample.nothing is None
    return (
        batch["ids"].tolist(),
        (sample.ids.tolist(), sample.text),
        [each.tolist() for each in batch["ragged"]],
        (batch["half"][0].dtype, batch["half"][1], batch["half"][2].tolist()),
        batch["transposed"].tolist(),
        batch["sparse"].to_dense().tolist(),
        tuple(batch["empty"].shape),
        batch["large"].mean().item(),
    )


def structures(dispatch):
    configuration = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    loader = accelerator.prepare(DataLoader(Numbers(11), 2, collate_fn=rich))
    found = [told(batch) for batch in loader]
    accelerator.end_training()
    return found


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("world", [2, 3])
def test_whatever_pickles_arrives_as_it_was_read(world, run_processes):
    assert run_processes(structures, True, world=world) == run_processes(structures, False, world=world)


def metrics(options):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    found = []
    for dataset in (Stream(13), Stream(16), Numbers(13), Numbers(16)):
        loader = accelerator.prepare(DataLoader(dataset, 4))
        tensors, objects = [], []
        for batch in loader:
            tensors += accelerator.gather_for_metrics({"x": batch})["x"].tolist()
            objects += accelerator.gather_for_metrics([f"{each}" for each in batch.tolist()])
        found.append((dataset.length, tensors, objects))
    accelerator.end_training()
    return found


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("dispatch", [None, False, True])
@pytest.mark.parametrize("split", [False, True])
def test_metrics_are_exact_however_the_data_is_read(split, dispatch, run_processes):
    for found in run_processes(metrics, {"split_batches": split, "dispatch_batches": dispatch}):
        for length, tensors, objects in found:
            assert tensors == list(range(length))
            assert objects == [str(each) for each in range(length)]


class Broken(Stream):
    """Fails at its sixth sample."""

    def __iter__(self):
        yield from range(5)
        raise ValueError("sample 5 is damaged")


def failing(workers):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Broken(9), 1, num_workers=workers))
    seen = 0
    try:
        for _ in loader:
            seen += 1
    except Exception as error:
        return seen, type(error), str(error), getattr(error, "failed_rank", None)
    finally:
        accelerator.end_training()
    return "it did not fail"


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.by_default
def test_what_fails_where_it_is_read_is_raised_on_all_ranks(workers, run_processes):
    reader, other, another = run_processes(failing, workers, world=3)
    assert (reader[1], other[1], another[1]) == (ValueError, CollectiveError, CollectiveError)
    assert "sample 5 is damaged" in reader[2]
    assert "rank 0, which reads for all, has failed with ValueError: sample 5 is damaged" in other[2]
    assert reader[0] == other[0] == another[0]
    assert (reader[3], other[3], another[3]) == (None, 0, 0)


def leaving_for_the_next_epoch():
    """Rank 0 leaves the loop alone, and begins the next."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(8), 1))
    try:
        for _ in range(2):
            for _ in loader:
                if accelerator.process_index == 0:
                    break
    except CollectiveError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return "it did not fail"


@pytest.mark.needs("accel-ddp")
def test_a_rank_that_begins_the_next_epoch_alone_is_named(run_processes):
    for message in run_processes(leaving_for_the_next_epoch):
        assert "rank 0: the next batch (dispatch_batches), round 0 of epoch 1" in message
        assert "rank 1: the next batch (dispatch_batches), round 1 of epoch 0" in message


def leaving():
    """Rank 1 leaves the loop alone, and gathers."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(8), 1))
    try:
        for _ in loader:
            if accelerator.process_index == 1:
                break
        accelerator.gather(torch.zeros(1))
    except CollectiveError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return "it did not fail"


@pytest.mark.needs("accel-ddp")
def test_a_rank_that_leaves_the_loop_alone_is_named(run_processes):
    for message in run_processes(leaving):
        assert "rank 0: the next batch (dispatch_batches)" in message
        assert "rank 1: gather of (1,) float32" in message


def running_out(dispatch):
    """Rank 1 has a batch less, and goes on to the next epoch."""
    options = DataLoaderConfiguration(even_batches=False, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    loader = accelerator.prepare(DataLoader(Numbers(5), 1))
    try:
        for _ in range(2):
            for batch in loader:
                accelerator.gather_for_metrics(batch)
    except CollectiveError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return "it did not fail"


@pytest.mark.needs("accel-ddp")
def test_ranks_with_unequal_batches_are_told_apart_by_their_place_in_the_data(run_processes):
    for message in run_processes(running_out, False):
        assert "rank 0: gather_for_metrics in batch 3 of epoch 0" in message
        assert "rank 1: gather_for_metrics in batch 1 of epoch 1" in message


@pytest.mark.needs("accel-ddp")
def test_a_rank_that_has_run_out_is_waited_for_by_name_where_another_reads_for_it(run_processes):
    for message in run_processes(running_out, True):
        assert "rank 0: gather_for_metrics in batch 3 of epoch 0" in message
        assert "rank 1: the next batch" in message
