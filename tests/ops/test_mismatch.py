"""Ranks that do not call alike all hear of it, with what each brought; nobody waits without a word."""

from __future__ import annotations

import time
from collections import UserDict

import pytest
import torch
from rank_processes import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from accel_core import CollectiveError, ops
from accel_core.distributed.random import synchronize_rng_state

pytestmark = pytest.mark.needs("accel-ddp")
TENSOR = torch.ones(2)


def gather_what_is_mine(accelerator, brought):
    try:
        ops.gather(brought[accelerator.process_index])
    except CollectiveError as error:
        accelerator.wait_for_everyone()  # nothing hangs, nothing is broken afterwards
        return str(error), error.operation, error.found


@pytest.mark.parametrize(
    ("brought", "found"),
    [
        ([torch.ones(2), torch.ones(3)], ("gather of (2,) float32", "gather of (3,) float32")),
        ([torch.ones(2), torch.ones(2).long()], ("gather of (2,) float32", "gather of (2,) int64")),
        ([torch.ones(9000), torch.ones(2)], ("gather of (9000,) float32", "gather of (2,) float32")),
        ([[torch.ones(1)], torch.ones(1)], ("gather of list; [0] (1,) float32", "gather of (1,) float32")),
        ([[TENSOR], [TENSOR, TENSOR]], ("gather of nothing there", "gather of [1] (2,) float32")),
        ([[TENSOR, None], [TENSOR, TENSOR]], ("gather of [1] NoneType", "gather of [1] (2,) float32")),
        (
            [{"same": torch.ones(1), "b": torch.ones(2)}, {"same": torch.ones(1), "b": torch.ones(3)}],
            ("gather of ['b'] (2,) float32", "gather of ['b'] (3,) float32"),
        ),
        (
            [{"a": TENSOR, "b": TENSOR}, {"b": TENSOR, "a": TENSOR}],
            (
                "gather of dict; ['a'] (2,) float32; ['b'] (2,) float32",
                "gather of dict; ['b'] (2,) float32; ['a'] (2,) float32",
            ),
        ),
        (
            [[torch.ones(1).char()] * 9, [torch.ones(2).char()] * 9],
            (
                "gather of [0] (1,) int8; [1] (1,) int8; [2] (1,) int8; [3] (1,) int8; and 5 more",
                "gather of [0] (2,) int8; [1] (2,) int8; [2] (2,) int8; [3] (2,) int8; and 5 more",
            ),
        ),
    ],
    ids=[
        "shape",
        "dtype",
        "large and small",
        "nesting",
        "number of leaves",
        "None",
        "one key",
        "order of keys",
        "many places",
    ],
)
def test_what_differs_is_shown_of_each_rank_on_all_ranks(brought, found, run_processes):
    for message, operation, seen in ranks(run_processes, gather_what_is_mine, brought):
        assert (operation, seen) == ("gather", found)
        assert f"rank 1: {found[1]}" in message
        assert message.splitlines()[-1].startswith("call it on all ranks alike")


def call(name):
    {
        "gather": lambda: ops.gather(TENSOR),
        "reduce": lambda: ops.reduce(TENSOR, "sum"),
        "reduce otherwise": lambda: ops.reduce(TENSOR, "max"),
        "broadcast": lambda: ops.broadcast(TENSOR),
        "broadcast from another": lambda: ops.broadcast(TENSOR, 1),
        "gather_object": lambda: ops.gather_object([1]),
        "broadcast_object_list": lambda: ops.broadcast_object_list([1]),
        "pad": lambda: ops.pad_across_processes(TENSOR),
        "pad of a list": lambda: ops.pad_across_processes([TENSOR]),
        "wait": ops.wait_for_everyone,
        "random": lambda: synchronize_rng_state("torch"),
    }[name]()


def call_all_pairs(accelerator, pairs):
    seen = []
    for pair in pairs:
        try:
            call(pair[accelerator.process_index])
        except CollectiveError as error:
            seen.append(error.found)
    return seen


def test_different_operations_raise_on_all_ranks(run_processes):
    texts = {
        "gather": "gather of (2,) float32",
        "reduce": "reduce (sum) of (2,) float32",
        "reduce otherwise": "reduce (max) of (2,) float32",
        "broadcast": "broadcast from 0 of (2,) float32",
        "broadcast from another": "broadcast from 1 of (2,) float32",
        "gather_object": "gather_object of list; [0] int",
        "broadcast_object_list": "broadcast_object_list from 0 of list; [0] int",
        "wait": "wait_for_everyone",
        "random": "synchronize_rng_state('torch')",
    }
    pairs = [(one, other) for one in texts for other in texts if one != other]

    for seen in ranks(run_processes, call_all_pairs, pairs):
        for pair, (one, other) in zip(pairs, seen, strict=True):
            assert (texts[pair[0]].startswith(one), texts[pair[1]].startswith(other)) == (True, True), pair


def test_padding_compares_structures(run_processes):
    found = ("pad_across_processes of (2,) float32", "pad_across_processes of list; [0] (2,) float32")
    assert ranks(run_processes, call_all_pairs, [("pad", "pad of a list")]) == [[found]] * 2


def gather_like_objects(accelerator):
    rank = accelerator.process_index
    return [
        ops.gather_object({"a": [rank], "b": (rank,)} if rank else {"b": (rank,), "a": [rank]}),
        ops.gather_object(UserDict(a=[rank])),
        ops.gather_object(("one",) if rank else ["other"]),
        ops.gather_object("text" if rank else None),
        ops.gather_object([] if rank else [None]),
        ops.gather_object({"a": [0]} if rank else {"b": [0]}),
        ops.gather_object("text" if rank else [0]),
    ]


def test_objects_that_are_alike_are_joined_and_others_are_listed(run_processes):
    expected = [{"a": [0, 1], "b": [0, 1]}, {"a": [0, 1]}, ["other", "one"], [None, "text"], [None]]
    expected += [[{"b": [0]}, {"a": [0]}], [[0], "text"]]
    assert ranks(run_processes, gather_like_objects) == [expected, expected]


def refuse_on_all_ranks(accelerator):
    with pytest.raises(TypeError) as raised:
        ops.gather({"a": [TENSOR, "text"]})
    accelerator.wait_for_everyone()
    return str(raised.value)


def test_what_no_rank_can_do_is_each_ones_own_error(run_processes):
    for message in ranks(run_processes, refuse_on_all_ranks):
        assert message.startswith("gather takes nested tensors, but ['a'][1] is a str\nuse gather_object")


def gather_distributed_tensors(accelerator):
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError) as raised:
        ops.gather({"weight": distribute_tensor(TENSOR, mesh, [Replicate()])})
    return str(raised.value)


def test_distributed_and_sparse_tensors_are_refused_with_the_way_out(run_processes):
    for message in ranks(run_processes, gather_distributed_tensors):
        assert message.startswith("gather takes nested tensors, but ['weight'] is a DTensor\ngive")
        assert ".full_tensor()" in message


def gather_odd_tensors(accelerator):
    said = []
    for odd in (
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.eye(2).to_sparse(),
    ):
        with pytest.raises(TypeError) as raised:
            ops.gather({"a": odd})
        said.append(str(raised.value).partition("\n")[0])
    return said


@pytest.mark.filterwarnings("ignore")  # torch's, of quantized and of nested tensors
def test_quantized_nested_and_sparse_tensors_are_refused_by_their_place(run_processes):
    expected = ["quantized Tensor", "nested Tensor", "Tensor of layout torch.sparse_coo"]
    for said in ranks(run_processes, gather_odd_tensors):
        assert said == [f"gather takes nested tensors, but ['a'] is a {kind}" for kind in expected]


def test_different_depths_and_many_ranks(run_processes):
    brought = [TENSOR, TENSOR, [TENSOR]]
    for _, _, found in ranks(run_processes, gather_what_is_mine, brought, world=3):
        assert found == (*["gather of (2,) float32"] * 2, "gather of list; [0] (2,) float32")


def one_rank_stays_away(accelerator, away):
    if accelerator.process_index == 1:
        away(accelerator)
        return None
    try:
        ops.gather({"logits": torch.ones(4, 2), "ids": torch.ones(4).long()})
    except CollectiveError as error:
        return str(error).splitlines()


def be_late(accelerator):
    time.sleep(7)  # longer than the others wait, and then listen for who else waits


def wait_in_another_group(accelerator):
    with pytest.raises(CollectiveError):
        accelerator.run.collectives("world").barrier()


@pytest.mark.full
def test_ranks_that_never_come_are_named_with_the_operation_and_what_is_here(run_processes):
    first, _, third = ranks(run_processes, one_rank_stays_away, be_late, world=3, timeout=3)
    for rank, lines in ((0, first), (2, third)):
        assert lines[0] == (
            "gather of ['logits'] (4, 2) float32; ['ids'] (4,) int64:"
            f" rank {rank} waited for rank(s) 1 of 3, which did not come"
        )
        assert lines[-1].endswith("process_group.timeout says how long the others wait")


@pytest.mark.full
def test_what_the_missing_rank_does_instead_is_told_if_it_is_known(run_processes):
    first, _ = ranks(run_processes, one_rank_stays_away, wait_in_another_group, timeout=3)
    assert first[0].endswith("rank 0 waited for rank(s) 1 of 2, which did not come")
    assert first[1] == "  rank 1 waits in barrier"
