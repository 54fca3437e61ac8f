"""Level 3: several processes share one order of data, one metric, and what they tell each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accel_testing.kit import tasks_collectives as collectives
from accel_testing.kit import tasks_data
from accel_testing.kit import tasks_parallel as tasks
from accel_testing.kit.checks import concerns
from accel_testing.kit.plugin import Kit

pytestmark = concerns("device", "strategy", "extension")

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("dim", ["world", "control"])
def test_collectives(run: Run, world: int, dim: str) -> None:
    ranks = range(world)
    for rank, found in enumerate(run(tasks.dims, world=world)):
        mine = found[dim]
        assert (mine["rank"], mine["size"]) == (rank, world)
        assert mine["torchs"] in (None, world), "its torch process group is of another size"
        assert mine["sum"] == [sum(r + 1 for r in ranks), 10 * world]
        assert mine["mean"] == [(world + 1) / 2, 10]
        assert mine["min"] == [1, 10]
        assert mine["max"] == [world, 10]
        assert mine["gather"] == [value for r in ranks for value in (r + 1, 10)]
        assert mine["scalars"] == (world, 2)
        assert mine["broadcast"] == [world, 10]
        assert mine["objects"] == [{"rank": r} for r in ranks]
        assert mine["object"] == "from 0"


def test_gather_reduce_broadcast_pad(run: Run, world: int, readers: int) -> None:
    shares = range(readers)
    for found in run(tasks.nested, world=world):
        assert found["a"] == [float(r) for r in shares for _ in range(2)]
        assert found["b"] == list(shares)
        assert found["scalar"] == [float(r) for r in shares]
        assert found["sum"] == sum(r + 1 for r in shares) * found["each"]  # ranks with losses of their own
        assert found["mean"] == (readers + 1) / 2
        assert found["broadcast"] == [world - 1]
        assert found["padded"] == [[r + 1] * (r + 1) + [0] * (readers - r - 1) for r in shares]


def test_every_kind_of_tensor_travels_whole(run: Run, world: int, readers: int) -> None:
    for found in run(collectives.kinds, world=world):
        for size in ("small", "large"):
            wrong = [
                dtype for dtype, seen in zip(collectives.DTYPES, found[size], strict=True) if not all(seen)
            ]
            assert not wrong, f"{size} tensors of {wrong} do not arrive as they were sent"
        assert found["types"] == ("OrderedDict", "Pair", None)
        assert (found["empty"], found["gradient"]) == ((0, 3), False)
        assert found["turned"] == [number * (3 + at) for number in range(1, readers + 1) for at in range(3)]
        assert found["least"] == [1, -readers]
        assert found["count"] == found["each"]


def test_objects_travel(run: Run, world: int, readers: int) -> None:
    for found in run(collectives.objects, world=world):
        assert found["gathered"] == [{"reader": reader} for reader in range(readers)]
        assert found["large"] == [collectives.LARGE * (reader + 1) for reader in range(readers)]
        assert found["sent"] == [f"from {world - 1}", {"rank": world - 1}]
        assert found["directly"] == world - 1


def test_ranks_that_disagree_are_told_what_each_brought(run: Run, world: int) -> None:
    expected = {
        "shape": ("broadcast from 0 of (2,) float32", "broadcast from 0 of (1,) float32"),
        "dtype": ("broadcast from 0 of (2,) float32", "broadcast from 0 of (2,) int32"),
        "structure": ("broadcast from 0 of list; [0] (2,) float32", "broadcast from 0 of (2,) float32"),
        "operation": ("broadcast from 0 of (2,) float32", "wait_for_everyone"),
    }
    for found in run(collectives.disagreement, world=world):
        for case, (first, other) in expected.items():
            assert found[case] == ((first, *[other] * (world - 1)) if world > 1 else ()), case


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_sample_is_read_once_an_epoch(run: Run, world: int, shuffle: bool) -> None:
    found = run(tasks.samples, 8 * world, 2, shuffle, 2, world=world)
    by_reader = {each["reader"][0]: each for each in found}
    assert sorted(by_reader) == list(range(found[0]["reader"][1])), "readers are not numbered 0, 1, ..."
    for epoch in range(2):
        read = [sample for each in by_reader.values() for batch in each["epochs"][epoch] for sample in batch]
        assert sorted(read) == list(range(8 * world))
    if shuffle:
        assert found[0]["epochs"][0] != found[0]["epochs"][1], "the second epoch has the first one's order"


def test_batches_are_dealt_in_turn(run: Run, world: int) -> None:
    found = run(tasks.samples, 8 * world, 2, False, 1, world=world)
    for each in found:
        reader, readers = each["reader"]
        dealt = each["epochs"][0]
        assert dealt == [[start, start + 1] for start in range(2 * reader, 8 * world, 2 * readers)]
        assert each["length"] == len(dealt)


def test_all_readers_get_equally_many_full_batches(run: Run, world: int) -> None:
    found = run(tasks.samples, 4 * world + 1, 2, False, 1, world=world)
    sizes = {tuple(len(batch) for batch in each["epochs"][0]) for each in found}
    assert len(sizes) == 1, f"readers get batches of different sizes: {sizes}"
    read = {sample for each in found for batch in each["epochs"][0] for sample in batch}
    assert read == set(range(4 * world + 1))


@pytest.mark.parametrize("length", [11, 12, 13, 17])
def test_metrics_see_each_sample_once_in_order(run: Run, world: int, length: int) -> None:
    for seen in run(tasks.metrics, length, 3, world=world):
        assert seen == list(range(length))


READ = [("iterable", None), ("iterable", False), ("map", True)]


@pytest.mark.parametrize(("data", "dispatch"), READ)
def test_data_arrives_whole_whoever_reads_it(run: Run, world: int, data: str, dispatch: bool | None) -> None:
    found = run(tasks_data.stream, 13, 3, data, dispatch, world=world)
    for each in found:
        assert each["seen"] == [(number, number, number) for number in range(13)]
    if data == "iterable":
        reads_alone = dispatch is None
        readers = [each["read"] for each in found]
        assert readers == [13] + [0 if reads_alone else 13] * (world - 1), "other processes read the data"


@pytest.mark.parametrize(("data", "dispatch"), READ)
def test_a_saved_epoch_goes_on_where_it_was(run: Run, world: int, data: str, dispatch: bool | None) -> None:
    for each in run(tasks_data.resumed, data, dispatch, world=world):
        assert each["found"] == each["expected"]
        assert each["expected"], "nothing was left of the epoch"


def test_buffers_that_differ_by_rank_are_exported_as_the_first_ranks(run: Run, kit: Kit, world: int) -> None:
    kit.require_own_network()
    found, *_ = run(tasks.own_buffers, world=world)
    assert found == {"scale": (3.0, "torch.float32"), "count": (1001, "torch.int64")}


def test_a_batch_that_others_lack_is_refused_not_waited_for(run: Run, world: int, readers: int) -> None:
    for rank, (evaluated, trained) in enumerate(run(tasks.unshared, world=world)):
        for told in filter(None, (evaluated, trained)):
            assert "not all of" in told, told
            assert "join_uneven_inputs" in told, told
        if readers == world > 1:
            assert bool(trained) == (rank == 0), "training on a batch that other ranks lack"


def test_processes_coordinate(run: Run, world: int) -> None:
    found = run(tasks.coordination, world=world)
    assert all(each["triggers"] == (False, True, False) for each in found)
    assert found[0]["entered"] == min(each["entered"] for each in found)
    shares = dict(each["share"] for each in found)
    assert [item for reader in sorted(shares) for item in shares[reader]] == list(range(5))
    assert [each["main"] for each in found] == [True] + [False] * (world - 1)
    assert [each["last"] for each in found] == [False] * (world - 1) + [True]
    assert [each["only"] for each in found] == [0] + [None] * (world - 1)
