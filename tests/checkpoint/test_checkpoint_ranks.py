"""Several ranks: shares, boxes, other world sizes, and failures of one rank that all hear of."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import device_job
import pytest
import ranks_job
import torch
from lookup import home_of, members_of
from rank_threads import Barred

from accel_core import CollectiveError
from accel_core.checkpoint.sections.random_streams import derived_seed
from accel_core.distributed.together import run_on_all_ranks
from accel_core.storage.codec import decode

pytestmark = pytest.mark.needs("accel-ddp")


def run(run_processes, function, folder, *args, world=2):
    return run_processes(function, str(folder), *args, world=world, timeout=60)


def index(folder, rank):
    return json.loads((home_of(folder / "here") / f"rank-{rank:05d}.json").read_bytes())


def test_replicas_are_written_once_and_spread(tmp_path, run_processes):
    run(run_processes, ranks_job.save_it, tmp_path)
    written = [
        {(unit, key) for unit, keys in index(tmp_path, rank)["tensors"].items() for key in keys}
        for rank in range(2)
    ]
    assert written[0] & written[1] == set()
    assert len(written[0] | written[1]) == 6 + 3 * 6
    assert min(map(len, written)) > 5


def test_plain_state_that_ranks_have_alike_is_in_no_ranks_own_file(tmp_path, run_processes):
    run(run_processes, ranks_job.save_it, tmp_path)
    for rank in range(2):
        assert index(tmp_path, rank)["state"].keys() == {"loaders", "plugins", "random", "reader"}


def test_buffers_are_those_of_the_first_rank(tmp_path, run_processes):
    first, second = run(run_processes, ranks_job.save_it, tmp_path, "batch norm")
    assert first != second, "batch norm has seen other samples on each rank"
    (found, _), (other, _) = run(run_processes, ranks_job.load_it, tmp_path, "batch norm")
    assert found == other == first


def test_a_registered_object_that_differs_by_rank_is_named_once(tmp_path, run_processes):
    said = run(run_processes, ranks_job.save_sums, tmp_path, world=3)
    told = "registered object 1 (Sum) has other values on other ranks than on rank 0, whose values are saved"
    assert [len([line for line in lines if told in line]) for lines in said] == [1, 0, 0]
    assert not any("registered object 0" in line for lines in said for line in lines)


WAYS = [("whole", 1), ("whole", 2), ("rows", 1), ("rows", 2), ("rows", 3)]


@pytest.mark.parametrize("saved", WAYS, ids=str)
@pytest.mark.by_default
def test_saved_in_any_way_it_loads_in_any_other(tmp_path, saved, run_processes):
    how, world = saved
    expected = run(run_processes, ranks_job.save_it, tmp_path, how, world=world)[0]
    for here, ranks in [("whole", 1), ("rows", 2)]:
        for rank, (found, rate) in enumerate(
            run(run_processes, ranks_job.load_it, tmp_path, here, world=ranks)
        ):
            assert rate == 0.01
            if here == "whole":
                assert found == expected
            else:
                check_rows(found, expected, rank, ranks)


def check_rows(found, expected, rank, ranks):
    """This rank's rows are the checkpoint's; the strategy of the test leaves the others as they were."""
    for mine, whole in zip(found, expected, strict=True):
        rows = 6 if len(whole) in (6, 48) else 4
        width = len(whole) // rows
        first, last = rows * rank // ranks * width, rows * (rank + 1) // ranks * width
        if len(whole) > 1:
            assert mine[first:last] == whole[first:last]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_data_goes_on_in_the_same_order_at_another_world_size(tmp_path, before, after, run_processes):
    whole = run(run_processes, ranks_job.data_goes_on, tmp_path, 8 // before, False, world=before)
    resumed = run(run_processes, ranks_job.data_goes_on, tmp_path, 8 // after, True, world=after)
    expected = sorted(sample for samples in whole for sample in samples)
    assert sorted(sample for samples in resumed for sample in samples) == expected
    assert len(expected) == 64 - 16


def test_random_streams_go_on_rank_by_rank(tmp_path, run_processes):
    expected = [drawn for drawn, _ in run(run_processes, ranks_job.random_after_load, tmp_path, False)]
    found = [drawn for drawn, _ in run(run_processes, ranks_job.random_after_load, tmp_path, True)]
    assert found == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("world", [1, 3])
def test_random_streams_in_another_world_follow_the_documented_rule(tmp_path, world, run_processes):
    run(run_processes, ranks_job.random_after_load, tmp_path, False)
    saved = index(tmp_path, 0)["state"]["random"]
    for reader, (drawn, logged) in enumerate(
        run(run_processes, ranks_job.random_after_load, tmp_path, True, world=world)
    ):
        seed = derived_seed(decode(saved, "random"), reader)
        told = f"saved by 2 process(es), not {world}: random numbers, as of dropout, start anew" in logged
        assert told is (reader == 0)
        assert "plugin" not in str(logged)
        torch.manual_seed(seed)
        if reader == 0:  # orders of later epochs are drawn from it
            torch.set_rng_state(decode(saved, "random")["torch"])
        assert drawn == torch.rand(4).tolist()
    random = members_of(tmp_path / "here")["random"]
    assert random == {"exact_at": {"size": 2, "readers": 2}, "elsewhere": "derived"}


def test_plugins_get_back_what_belongs_to_all_readers_and_ranks(tmp_path, run_processes):
    run(run_processes, ranks_job.plugin_entries, tmp_path, False)
    for rank, found in enumerate(run(run_processes, ranks_job.plugin_entries, tmp_path, True)):
        assert found == {
            "all": {"scale": 2.0},
            "stage 0": 0,
            "stage 1": 1,
            "reader": ("reader", rank),
            "rank": ("rank", rank),
            "tensor": [float(rank)] * 3,
        }


def test_at_another_world_size_plugins_get_only_what_means_something_there(tmp_path, run_processes):
    run(run_processes, ranks_job.plugin_entries, tmp_path, False)
    (found,) = run(run_processes, ranks_job.plugin_entries, tmp_path, True, world=1)
    assert found == {"all": {"scale": 2.0}, "stage 0": 0, "stage 1": 1}


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("disk full", "rank 1: OSError: [Errno 28] No space left on device"),
        ("window", "rank 1: CheckpointError: unit 'unit0' has accumulated"),
        ("folder", "made by rank 0, is not visible here"),
        ("sharded differently", "rank 0 says"),
        ("registered", "rank 1: CheckpointError: registered[0] (Lambda).f cannot be stored"),
    ],
)
def test_what_fails_on_one_rank_is_told_on_all_and_the_old_checkpoint_stays(
    tmp_path, trouble, words, run_processes
):
    for said, left in run(run_processes, ranks_job.message_of, tmp_path, trouble):
        assert said.startswith("CheckpointError:")
        assert words in said
        assert left == ["here"]


def test_damage_that_one_rank_finds_stops_all(tmp_path, run_processes):
    run(run_processes, ranks_job.save_it, tmp_path)
    path = home_of(tmp_path / "here") / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    for said in run(run_processes, ranks_job.load_damaged, tmp_path):
        assert "rank-00001.safetensors is damaged: block 0 is not what was written" in said


@pytest.mark.simulated
@pytest.mark.parametrize("here", ["sim", "cpu"])
@pytest.mark.parametrize("algorithm", ["AdamW", "Adafactor"])
def test_saved_on_one_device_it_goes_on_on_another(tmp_path, here, algorithm, run_processes):
    ((saved, losses),) = run(run_processes, device_job.steps, tmp_path, "sim", False, algorithm, world=1)
    ((where, found),) = run(run_processes, device_job.steps, tmp_path, here, True, algorithm, world=1)
    assert where == {name: "cpu" if name == "step" else here for name in saved}
    assert found == losses


def test_a_rank_that_holds_everything_saves_alone(tmp_path, run_processes):
    (first, _), (second, _) = run(run_processes, ranks_job.save_alone, tmp_path)

    assert first == second
    assert members_of(tmp_path / "here")["world"]["size"] == 1


def test_what_any_rank_has_saved_alone_goes_on_in_one_process(tmp_path, run_processes):
    _, saved = run(run_processes, ranks_job.saved_by_rank_1_alone, tmp_path)
    ((found, taken),) = run(run_processes, ranks_job.loaded_with_plugin, tmp_path, world=1)

    assert found == saved
    assert taken == {
        "all": {"scale": 2.0},
        "stage 1": 1,
        "reader": ("reader", 1),
        "rank": ("rank", 1),
        "tensor": [1.0] * 3,
    }


def test_a_rank_that_holds_parts_does_not_save_alone(tmp_path, run_processes):
    (_, said), _ = run(run_processes, ranks_job.save_alone, tmp_path, "rows")

    assert "what the ranks hold is not the whole state" in said
    assert not (tmp_path / "here").exists()


def test_ranks_at_different_steps_are_told_which():
    slots, barrier = [None] * 2, threading.Barrier(2)

    def step(rank):
        run_on_all_ranks(Barred(rank, slots, barrier), ("save_state: copy", "load_state: open")[rank], list)

    with ThreadPoolExecutor(2) as threads:
        errors = [future.exception(20) for future in [threads.submit(step, rank) for rank in range(2)]]
    for error in errors:
        assert isinstance(error, CollectiveError)
        assert "  rank 0: save_state: copy\n  rank 1: load_state: open\n" in str(error)
