"""Collectives between real processes, and what they do in one."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rank_processes import ranks
from torch.utils.data import DataLoader, IterableDataset

from accel_core import Accelerator, CollectiveError, RandomStream, Topology, ops
from accel_core.distributed.nested import Description
from accel_core.distributed.process_group import Alone
from accel_core.distributed.random import synchronize_rng_state


class Point(NamedTuple):
    x: Any
    y: Any


def count_collectives(run):
    """A list that grows by a name with each collective of the run."""
    calls = []
    for dim in ("world", "control"):
        collectives = run.collectives(dim)
        for name in ("all_reduce", "all_gather", "broadcast", "all_gather_object", "broadcast_object"):
            method = getattr(collectives, name)

            def counted(*arguments, method=method, name=name):
                calls.append(name)
                return method(*arguments)

            setattr(collectives, name, counted)
    return calls


@pytest.fixture
def alone():
    """One process: collectives that would fail if they were used."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        topology=Topology(),
        active_loaders=[],
        observe_collective=None,
        collectives=lambda dim="world": Alone(),
    )


# -- gather ----------------------------------------------------------------------------------------


def gather_odd_tensors(accelerator):
    rank = accelerator.process_index
    weight = torch.full((2,), float(rank), requires_grad=True)
    gathered = accelerator.gather(
        {
            "scalar": torch.tensor(rank),
            "empty": torch.empty(0, 3),
            "transposed": torch.arange(6).view(2, 3).T + 10 * rank,
            "grad": weight * 2,
            "point": Point(torch.ones(1, dtype=torch.bool), [torch.zeros(1)]),
        }
    )
    return (
        gathered["scalar"].tolist(),
        tuple(gathered["empty"].shape),
        gathered["transposed"].tolist(),
        gathered["grad"].requires_grad,
        type(gathered["point"]).__name__,
    )


@pytest.mark.needs("accel-ddp")
def test_gather_of_scalars_empty_strided_and_differentiable_tensors(run_processes):
    expected = ([0, 1], (0, 3), [[0, 3], [1, 4], [2, 5], [10, 13], [11, 14], [12, 15]], False, "Point")
    assert ranks(run_processes, gather_odd_tensors) == [expected, expected]


def count_of_gathers(accelerator):
    calls = count_collectives(accelerator.run)
    small = {
        f"k{number}": torch.ones(8, dtype=(torch.float32, torch.int64)[number % 2]) for number in range(64)
    }
    ops.gather(small)
    first = list(calls)
    large = [torch.ones(5000), torch.ones(5000, dtype=torch.int32)]
    ops.gather(large)
    second = calls[len(first) :]
    ops.reduce(large, "sum")
    return first, second, calls[len(first) + len(second) :]


@pytest.mark.needs("accel-ddp")
def test_small_operations_cost_one_collective_and_large_ones_one_more_a_dtype_at_most(run_processes):
    assert ranks(run_processes, count_of_gathers)[0] == (
        ["all_gather"],
        ["all_gather", "all_gather"],
        ["all_gather", "all_reduce", "all_reduce"],
    )


def gather_large(accelerator):
    mine = torch.arange(30000.0).view(300, 100) + accelerator.process_index
    gathered = ops.gather((mine, mine.to(torch.bfloat16)))
    expected = torch.cat([torch.arange(30000.0).view(300, 100) + rank for rank in range(3)])
    return torch.equal(gathered[0], expected) and torch.equal(gathered[1], expected.to(torch.bfloat16))


@pytest.mark.needs("accel-ddp")
def test_gather_of_what_does_not_travel_with_the_check(run_processes):
    assert ranks(run_processes, gather_large, world=3) == [True] * 3


def test_what_is_no_tensor_is_refused_by_its_place(alone):
    with pytest.raises(
        TypeError, match=r"gather takes nested tensors, but \['a'\]\[1\] is a str\nuse gather_object"
    ):
        ops.gather({"a": [torch.ones(1), "text"]}, run=alone)


def test_one_process_gathers_with_the_same_shapes_and_no_gradient(alone):
    weight = torch.ones(2, requires_grad=True)
    gathered = ops.gather([torch.tensor(1.0), weight], run=alone)
    assert [tuple(tensor.shape) for tensor in gathered] == [(1,), (2,)]
    assert not gathered[1].requires_grad


def gather_objects(accelerator):
    rank = accelerator.process_index
    return (
        ops.gather_object([rank, "x" * rank]),
        ops.gather_object({"a": [rank], "b": [None]}),
        ops.gather_object(rank),
        len(ops.gather_object(["long" * 9000 * (rank + 1)])[1]),
    )


@pytest.mark.needs("accel-ddp")
def test_gather_object_joins_lists_by_rank(run_processes):
    expected = ([0, "", 1, "x"], {"a": [0, 1], "b": [None, None]}, [0, 1], 72000)
    assert ranks(run_processes, gather_objects) == [expected, expected]


def test_one_process_gathers_objects_in_the_same_form(alone):
    assert ops.gather_object([1, 2], run=alone) == [1, 2]
    assert ops.gather_object("text", run=alone) == ["text"]


# -- gather_for_metrics ----------------------------------------------------------------------------


class Texts(NamedTuple):
    predictions: list[str]
    references: list[str]


def gather_texts(accelerator):
    texts = [f"s{number}" for number in range(7)]  # the last batch of one rank is filled up
    loader = accelerator.prepare(DataLoader(texts, batch_size=2, collate_fn=list))
    pairs, named = [], []
    for batch in loader:
        upper = [text.upper() for text in batch]
        predictions, references = accelerator.gather_for_metrics((batch, upper))
        pairs += zip(predictions, references, strict=True)
        both = accelerator.gather_for_metrics(Texts(batch, upper))
        named += zip(both.predictions, both.references, strict=True)
    return pairs, named


@pytest.mark.needs("accel-ddp")
def test_a_tuple_of_lists_of_texts_keeps_its_shape_in_gather_for_metrics(run_processes):
    expected = [(f"s{number}", f"S{number}") for number in range(7)]
    for pairs, named in ranks(run_processes, gather_texts):
        assert pairs == named == expected


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(13))


def epoch_of_metrics(accelerator, iterable, split):
    data = Stream() if iterable else list(range(13))
    loader = accelerator.prepare(DataLoader(data, batch_size=4))
    tensors, structures, objects = [], [], []
    for batch in loader:
        tensors += accelerator.gather_for_metrics(batch).tolist()
        structures += accelerator.gather_for_metrics({"a": (batch, batch)})["a"][1].tolist()
        objects += accelerator.gather_for_metrics([f"{number}" for number in batch.tolist()])
    return tensors, structures, objects


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("iterable", [False, True])
def test_gather_for_metrics_drops_exactly_the_padding(iterable, split, run_processes):
    for found in ranks(run_processes, epoch_of_metrics, iterable, split, split_batches=split):
        assert found == (list(range(13)), list(range(13)), [f"{number}" for number in range(13)])


def evaluate_inside_training(accelerator):
    train, test = accelerator.prepare(
        DataLoader(list(range(100, 105)), batch_size=2, shuffle=True),
        DataLoader(list(range(7)), batch_size=2),
    )
    seen, trained = [], []
    for batch in train:
        evaluation = []
        for number, samples in enumerate(test):
            evaluation += accelerator.gather_for_metrics(samples).tolist()
            if not seen and number == 0:
                break
        seen.append(evaluation)
        trained += accelerator.gather_for_metrics(batch).tolist()
    return seen, sorted(trained), len(accelerator.run.active_loaders)


@pytest.mark.needs("accel-ddp")
def test_an_evaluation_loop_inside_a_training_loop_has_its_own_padding(run_processes):
    expected = ([[0, 1, 2, 3], list(range(7))], [100, 101, 102, 103, 104], 0)
    assert ranks(run_processes, evaluate_inside_training) == [expected, expected]


# -- the others ------------------------------------------------------------------------------------


def reduce_all(accelerator):
    rank = accelerator.process_index
    values = torch.tensor([1.0, 2.0]) + rank
    half = values.to(torch.bfloat16)
    return {
        "sum": ops.reduce(values, "sum").tolist(),
        "mean": ops.reduce(values).tolist(),
        "min": ops.reduce(values, "min").tolist(),
        "max": ops.reduce({"a": values}, "max")["a"].tolist(),
        "none": ops.reduce(values, "none").tolist(),
        "scaled": ops.reduce(values, "sum", 0.5).tolist(),
        "counted": ops.reduce(torch.tensor([True, rank == 1]), "sum").tolist(),
        "all": ops.reduce(torch.tensor([True, rank == 1]), "min").tolist(),
        "half": (ops.reduce(half, "mean").tolist(), ops.reduce(half).dtype is torch.bfloat16),
        "eighth": ops.reduce(values.to(torch.float8_e4m3fn), "sum").float().tolist(),
        "large": ops.reduce(torch.full((20000,), float(rank)), "mean").unique().tolist(),
        "scalar": ops.reduce(torch.tensor(rank), "sum").item(),
    }


@pytest.mark.needs("accel-ddp")
def test_reduce(run_processes):
    first, second = ranks(run_processes, reduce_all)
    assert first == second | {"none": [1.0, 2.0]}
    assert first == {
        "sum": [3.0, 5.0],
        "mean": [1.5, 2.5],
        "min": [1.0, 2.0],
        "max": [2.0, 3.0],
        "none": [1.0, 2.0],
        "scaled": [1.5, 2.5],
        "counted": [2, 1],
        "all": [True, False],
        "half": ([1.5, 2.5], True),
        "eighth": [3.0, 5.0],
        "large": [0.5],
        "scalar": 1,
    }


def test_the_mean_of_integers_is_refused(alone):
    with pytest.raises(TypeError, match=r"no mean of torch.int64\nuse reduction='sum'"):
        ops.reduce(torch.ones(2).long(), run=alone)


def test_one_process_reduces_to_what_it_has(alone):
    values = torch.ones(2, requires_grad=True)
    assert ops.reduce(values, "mean", run=alone).tolist() == [1, 1]
    assert not ops.reduce(values, "sum", run=alone).requires_grad
    assert ops.reduce(torch.tensor([True]), "sum", run=alone).tolist() == [1]


def broadcast_all(accelerator):
    rank = accelerator.process_index
    weight = torch.nn.Parameter(torch.full((3, 2), float(rank)))
    large = torch.full((20000,), rank, dtype=torch.bool)
    returned = ops.broadcast(
        {"weight": weight, "large": large, "t": torch.ones(2, 2).T * rank}, from_process=1
    )
    objects = [rank, {"rank": rank}]
    assert ops.broadcast_object_list(objects, from_process=1) is objects
    return returned["weight"] is weight, weight.unique().tolist(), large.all().item(), objects


@pytest.mark.needs("accel-ddp")
def test_broadcast_overwrites_in_place(run_processes):
    expected = (True, [1.0], True, [1, {"rank": 1}])
    assert ranks(run_processes, broadcast_all) == [expected, expected]


def pad_all(accelerator):
    rank = accelerator.process_index
    mine = torch.full((rank + 1, 2), 7)
    padded = ops.pad_across_processes({"end": mine, "scalar": torch.tensor(1)}, pad_index=-1)
    first = ops.pad_across_processes(mine, pad_index=5, pad_first=True)
    last_dim = ops.pad_across_processes(mine.T.contiguous(), dim=-1)
    return padded["end"].tolist(), padded["scalar"].item(), first.tolist(), tuple(last_dim.shape)


@pytest.mark.needs("accel-ddp")
def test_pad_across_processes_makes_shapes_equal(run_processes):
    assert ranks(run_processes, pad_all) == [
        ([[7, 7], [-1, -1]], 1, [[5, 5], [7, 7]], (2, 2)),
        ([[7, 7], [7, 7]], 1, [[7, 7], [7, 7]], (2, 2)),
    ]


class Table:
    """Rows that are taken by their numbers and not sliced, as those of a dataset are."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __eq__(self, other):
        return isinstance(other, Table) and self.rows == other.rows

    __hash__ = None

    def select(self, numbers):
        return Table([self.rows[number] for number in numbers])


@pytest.mark.parametrize(
    ("inputs", "padding", "parts"),
    [
        (["A", "B", "C"], False, [["A", "B"], ["C"]]),
        (["A", "B", "C"], True, [["A", "B"], ["C", "C"]]),
        (("A",), True, [("A",), ("A",)]),
        ({"p": [1, 2, 3], "q": (4, 5, 6)}, True, [{"p": [1, 2], "q": (4, 5)}, {"p": [3, 3], "q": (6, 6)}]),
        ([], True, [[], []]),
        (Table([1, 2, 3]), False, [Table([1, 2]), Table([3])]),
        (Table([1, 2, 3]), True, [Table([1, 2]), Table([3, 3])]),
        (Table([1, 2, 3, 4]), True, [Table([1, 2]), Table([3, 4]), Table([4, 4])]),
        (UserDict(p=[1, 2, 3]), False, [{"p": [1, 2]}, {"p": [3]}]),
        ({"a": {"b": [1, 2, 3]}}, False, [{"a": {"b": [1, 2]}}, {"a": {"b": [3]}}]),
        ({"a": {}, "b": [1, 2]}, False, [{"a": {}, "b": [1]}, {"a": {}, "b": [2]}]),
        (range(3), False, [[0, 1], [2]]),
        (range(3), True, [[0, 1], [2, 2]]),
    ],
)
def test_split_between_processes(inputs, padding, parts):
    for reader, expected in enumerate(parts):
        run = SimpleNamespace(topology=Topology(reader=reader, readers=len(parts)))
        with ops.split_between_processes(inputs, apply_padding=padding, run=run) as part:
            assert part == expected


@pytest.mark.parametrize(("padding", "parts"), [(False, [[1, 2], [3]]), (True, [[1, 2], [3, 3]])])
def test_split_between_processes_splits_an_array(padding, parts):
    rows = np.array([[1, 1], [2, 2], [3, 3]])
    for reader, expected in enumerate(parts):
        run = SimpleNamespace(topology=Topology(reader=reader, readers=2))
        with ops.split_between_processes({"rows": rows}, apply_padding=padding, run=run) as part:
            assert part["rows"].tolist() == [[number, number] for number in expected]


@pytest.mark.parametrize("inputs", ["abc", {"text": "abc"}, {1, 2, 3}], ids=repr)
def test_split_between_processes_refuses_what_each_process_would_get_whole(inputs):
    run = SimpleNamespace(topology=Topology(reader=0, readers=2))
    with pytest.raises(TypeError, match="give a list"), ops.split_between_processes(inputs, run=run):
        pass


def test_split_between_processes_leaves_the_users_dict_alone():
    run = SimpleNamespace(topology=Topology(reader=1, readers=2))
    inputs = {"p": torch.arange(3), "q": [1, 2, 3]}
    with ops.split_between_processes(inputs, apply_padding=True, run=run) as part:
        assert part["p"].tolist() == [2, 2]
    assert inputs["q"] == [1, 2, 3]
    with (
        pytest.raises(ValueError, match="one length, got 0, 1"),
        ops.split_between_processes({"p": [1], "q": []}, run=run),
    ):
        pass


def test_split_between_processes_refuses_unequal_lengths_in_one_process_too(alone):
    with (
        pytest.raises(ValueError, match="one length"),
        ops.split_between_processes({"p": [1, 2], "q": [1]}, run=alone),
    ):
        pass
    with (
        pytest.raises(ValueError, match="one length"),
        ops.split_between_processes({"p": [1], "q": {"r": [1, 2]}}, run=alone),
    ):
        pass


@pytest.mark.parametrize(
    "inputs", ["abc", {1, 2}, None, iter([1])], ids=["text", "a set", "nothing", "an iterator"]
)
def test_split_between_processes_gives_one_process_whatever_it_is(inputs, alone):
    with ops.split_between_processes(inputs, run=alone) as part:
        assert part is inputs


def test_split_between_processes_gives_all_to_one_process(alone):
    with ops.split_between_processes([1, 2, 3], run=alone) as part:
        assert part == [1, 2, 3]


class OtherRank(Alone):
    """Collectives of two ranks, the other of which brought something else."""

    size = 2

    def all_gather(self, tensor):
        return torch.cat([tensor, tensor + 1])

    def all_gather_object(self, value):
        others = {"": Description("(9,) float32", is_tensor=True)}
        return [value, value + 1 if isinstance(value, int) else (*value[:2], others)]


@pytest.mark.parametrize("variable", ["ACCEL_DEBUG", "ACCELERATE_DEBUG_MODE"])
def test_on_accelerators_ranks_are_compared_in_debug_mode_only(alone, monkeypatch, variable):
    alone.device, alone.collectives = torch.device("meta"), lambda dim="world": OtherRank()
    assert ops.gather(torch.ones(3), run=alone).shape == (6,)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(CollectiveError, match=r"rank 1: gather of \(9,\) float32"):
        ops.gather(torch.ones(3), run=alone)


class Silent(Alone):
    """Collectives of two ranks, on which none is to be compared."""

    size = 2

    def all_gather(self, tensor):
        return torch.cat([tensor, tensor])

    def all_gather_object(self, value):
        raise AssertionError("ranks are compared elsewhere")


def test_on_accelerators_all_ranks_are_compared_in_memory_of_the_host(alone, monkeypatch):
    monkeypatch.setenv("ACCEL_DEBUG", "1")
    alone.device = torch.device("meta")
    alone.collectives = lambda dim="world": OtherRank() if dim == "control" else Silent()
    with pytest.raises(CollectiveError, match=r"rank 1: gather of \(9,\) float32"):
        ops.gather(torch.ones(3), run=alone)


def test_on_accelerators_some_ranks_are_compared_among_themselves(alone, monkeypatch):
    monkeypatch.setenv("ACCEL_DEBUG", "1")
    alone.device, alone.topology = torch.device("meta"), Topology(gather_dim="rows")
    alone.collectives = lambda dim="world": OtherRank() if dim == "rows" else Silent()
    with pytest.raises(CollectiveError, match=r"rank 1: gather of \(9,\) float32"):
        ops.gather(torch.ones(3), run=alone)


def test_on_accelerators_calls_that_exchange_objects_are_compared_always(alone):
    alone.device, alone.collectives = torch.device("meta"), lambda dim="world": OtherRank()
    stream = RandomStream(lambda: torch.zeros(1, dtype=torch.uint8), torch.set_rng_state)
    alone.hooks = SimpleNamespace(random_streams=lambda: {"torch": stream})
    with pytest.raises(CollectiveError, match="ranks passed different inputs"):
        synchronize_rng_state("torch", run=alone)


# -- any and all -----------------------------------------------------------------------------------


def agree(accelerator):
    rank, last = accelerator.process_index, accelerator.num_processes - 1
    flags = {"none": False, "first": rank == 0, "last": torch.tensor(rank == last), "each": torch.ones(1) > 0}
    calls = count_collectives(accelerator.run)
    found = {name: (accelerator.any(flag), accelerator.all(flag)) for name, flag in flags.items()}
    return found, calls


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_and_all_are_the_same_on_all_ranks_and_cost_one_collective(world, run_processes):
    alone = world == 1
    for found, calls in ranks(run_processes, agree, world=world):
        assert found["none"] == (False, False)
        assert found["first"] == found["last"] == (True, alone)
        assert found["each"] == (True, True)
        assert calls == ["all_gather"] * (8 if world > 1 else 0)


@pytest.mark.parametrize("flags", [[False, False], torch.tensor([False, True]), np.array([True, False])])
def test_any_takes_one_flag(flags):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match="2 elements"):
        accelerator.any(flags)
    accelerator.end_training()
