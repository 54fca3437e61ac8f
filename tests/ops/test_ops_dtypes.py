"""Every dtype, on its way with the check and after it."""

from __future__ import annotations

import sys

import pytest
import torch
from rank_processes import ranks

from accel_core import CollectiveError, ops
from accel_core.distributed.packing import make_plan

pytestmark = [pytest.mark.needs("accel-ddp"), pytest.mark.filterwarnings("ignore:ComplexHalf")]

FLOATS = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
SMALL, LARGE = 3, 20_000


def numbers(tensor):
    return tensor.to(torch.complex64).real.tolist()


def move_each_dtype(accelerator, size):
    rank, found = accelerator.process_index, {}
    for dtype in (torch.bool, *INTEGERS, *FLOATS, *COMPLEX):
        mine = torch.full((size,), rank).to(dtype)
        gathered, padded = ops.gather(mine), ops.pad_across_processes(mine[: size - rank], pad_index=1)
        sent = ops.broadcast(mine.clone(), 1)
        found[dtype] = (
            {gathered.dtype, padded.dtype, sent.dtype} == {dtype},
            numbers(gathered) == [0.0] * size + [1.0] * size,
            numbers(padded) == [float(rank)] * (size - rank) + [1.0] * rank,
            numbers(sent) == [1.0] * size,
        )
    return [str(dtype) for dtype, right in found.items() if not all(right)]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_gathering_padding_and_broadcasting_keep_every_dtype(size, run_processes):
    assert ranks(run_processes, move_each_dtype, size) == [[], []]


def move_objects_of_each_dtype(accelerator):
    """Return the dtypes that objects have lost on their way."""
    rank, wrong = accelerator.process_index, []
    for dtype in (torch.bool, *INTEGERS, *FLOATS, *COMPLEX):
        mine = {"matrix": torch.full((3, 2), rank).to(dtype).t(), "one": torch.tensor(rank).to(dtype)}
        mine["none"] = mine["matrix"][:0]
        (sent,) = ops.broadcast_object_list([mine], from_process=1)
        for found in (*ops.gather_object([mine])[1:], sent):
            right = [found[name].dtype == dtype and found[name].shape == mine[name].shape for name in mine]
            if not all(right) or set(numbers(found["matrix"].flatten())) != {1.0}:
                wrong.append(str(dtype))
    return wrong


def test_objects_keep_tensors_of_every_dtype(run_processes):
    """torch pickles float8, unsigned integers and complex32, and raises where they are unpickled."""
    assert ranks(run_processes, move_objects_of_each_dtype) == [[], []]


def reduce_each_dtype(accelerator, size):
    mine = torch.full((size,), accelerator.process_index + 1)
    wrong = []
    for dtype in (*INTEGERS, *FLOATS, *COMPLEX):
        expected = {"sum": 3.0}
        if dtype not in INTEGERS:
            expected["mean"] = 1.5
        if dtype not in (torch.uint64, *COMPLEX):
            expected |= {"min": 1.0, "max": 2.0}
        for reduction, value in expected.items():
            reduced = ops.reduce(mine.to(dtype), reduction)
            if reduced.dtype is not dtype or set(numbers(reduced)) != {value}:
                wrong.append((str(dtype), reduction))
        for reduction in {"sum", "mean", "min", "max"} - expected.keys():
            with pytest.raises(TypeError, match=f"no {reduction} of {dtype}"):
                ops.reduce(mine.to(dtype), reduction)
    return wrong


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_every_dtype_is_reduced_or_refused(size, run_processes):
    assert ranks(run_processes, reduce_each_dtype, size) == [[], []]


def reduce_to_the_edge(accelerator, size):
    rank = accelerator.process_index
    return (
        ops.reduce(torch.full((size,), 40000.0, dtype=torch.float16)).unique().tolist(),
        ops.reduce(torch.full((size,), 200, dtype=torch.uint8), "sum").unique().tolist(),
        ops.reduce(torch.full((size,), 30000, dtype=torch.int16), "sum").unique().tolist(),
        ops.reduce(torch.full((size,), rank == 1), "sum").unique().tolist(),
        ops.reduce(torch.full((size,), 256.0 if rank else 1.0, dtype=torch.bfloat16)).unique().tolist(),
    )


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_narrow_numbers_are_rounded_once_and_wrap_around(size, run_processes):
    # The sum of the halves overflows, their mean does not; 257 has no bfloat16, 128.5 rounds to 128.
    assert ranks(run_processes, reduce_to_the_edge, size) == [([40000.0], [144], [-5536], [1], [128.0])] * 2


def move_odd_layouts(accelerator, size):
    rank = accelerator.process_index
    weight = torch.full((size, 2), float(rank), requires_grad=True)
    mine = {
        "scalar": torch.tensor(rank),
        "empty": torch.empty(0, 3),
        "transposed": (torch.arange(2 * size).view(2, size) + rank).T,
        "strided": torch.arange(2 * size)[::2] + rank,
        "expanded": torch.tensor([rank]).expand(size),
        "conjugated": torch.full((size,), 1 + 2j).conj() + rank,
        "grad": weight * 2,
        "none": None,
    }
    gathered = ops.gather(mine)
    reduced = ops.reduce({name: value for name, value in mine.items() if name != "none"}, "sum")
    both = [{**mine, "transposed": (torch.arange(2 * size).view(2, size) + each).T} for each in range(2)]
    return {
        "scalar": (gathered["scalar"].tolist(), reduced["scalar"].item()),
        "empty": (tuple(gathered["empty"].shape), tuple(reduced["empty"].shape)),
        "transposed": torch.equal(gathered["transposed"], torch.cat([each["transposed"] for each in both])),
        "strided": torch.equal(
            gathered["strided"], torch.cat([torch.arange(2 * size)[::2] + each for each in range(2)])
        ),
        "expanded": (gathered["expanded"].unique().tolist(), reduced["expanded"].unique().tolist()),
        "conjugated": gathered["conjugated"].imag.tolist() == [-2.0] * (2 * size),
        "grad": (gathered["grad"].requires_grad, reduced["grad"].requires_grad, weight.requires_grad),
        "none": gathered["none"],
        "own": all(each.is_contiguous() for each in gathered.values() if each is not None),
    }


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_scalars_empty_strided_expanded_and_differentiable_tensors(size, run_processes):
    expected = {
        "scalar": ([0, 1], 1),
        "empty": ((0, 3), (0, 3)),
        "transposed": True,
        "strided": True,
        "expanded": ([0, 1], [1]),
        "conjugated": True,
        "grad": (False, False, True),
        "none": None,
        "own": True,
    }
    assert ranks(run_processes, move_odd_layouts, size) == [expected] * 2


def broadcast_what_inference_made(accelerator):
    with torch.inference_mode():
        made = torch.full((2,), float(accelerator.process_index))
    plain = torch.full((2,), float(accelerator.process_index), requires_grad=True)
    ops.broadcast([made, plain], 1)
    return made.tolist(), plain.tolist(), plain.requires_grad


def test_tensors_of_inference_mode_are_broadcast(run_processes):
    assert ranks(run_processes, broadcast_what_inference_made) == [([1.0, 1.0], [1.0, 1.0], True)] * 2


def gather_many(accelerator, size):
    rank, shapes = accelerator.process_index, [(), (size,), (2, 3), (0, 2)]
    wrong = []
    for dtype in (torch.bool, *INTEGERS, *FLOATS, *COMPLEX):
        of_ranks = [[torch.full(shape, each + at) for at, shape in enumerate(shapes)] for each in range(2)]
        gathered = ops.gather([leaf.to(dtype) for leaf in of_ranks[rank]])
        for result, parts in zip(gathered, zip(*of_ranks, strict=True), strict=True):
            expected = torch.cat([part.to(dtype).reshape(part.shape or 1) for part in parts])
            own = result.untyped_storage().nbytes() == result.nbytes
            same = result.shape == expected.shape and numbers(result) == numbers(expected)
            if not (own and same and result.dtype is dtype):
                wrong.append((str(dtype), tuple(expected.shape)))
    return wrong


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_each_of_many_gathered_tensors_is_whole_and_has_a_storage_of_its_own(size, run_processes):
    assert ranks(run_processes, gather_many, size) == [[], []]


def calls_of_a_leaf(accelerator):
    made = 0

    def count(frame, event, argument):
        nonlocal made
        made += event == "call"

    def calls(leaves):
        nonlocal made
        data = {"inner": {str(number): torch.ones(2) for number in range(leaves)}}
        ops.gather(data)
        made = 0
        sys.setprofile(count)
        ops.gather(data)
        sys.setprofile(None)
        return made

    return calls(100) - calls(10)


def test_a_gathered_leaf_of_a_dict_makes_no_python_call_of_its_own(run_processes):
    assert ranks(run_processes, calls_of_a_leaf) == [0, 0]


def gather_then_train(accelerator):
    weight = torch.ones(2, requires_grad=True)
    gathered = ops.gather([torch.ones(1), torch.ones(1)])
    loss = (weight * gathered[0]).sum()
    gathered[1].add_(1)
    loss.backward()
    return weight.grad.tolist()


def test_what_is_gathered_together_can_be_changed_apart(run_processes):
    assert ranks(run_processes, gather_then_train) == [[1.0, 1.0]] * 2


def test_leaves_are_put_in_order_on_their_own_device_whatever_the_default_one_is():
    plan = make_plan("gather", ("default device",), (torch.Size([2]), torch.Size([1])), (torch.int8,) * 2, 2)
    table = torch.zeros(2, plan.size, dtype=torch.uint8)
    table[:, :3] = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.device("meta"):
        rows = plan.rows(table)
    assert [row.tolist() for row in rows] == [[1, 2, 4, 5], [3, 6]]


def gather_all_kinds(accelerator, device):
    with torch.device(device):
        values = {
            "tensors": accelerator.gather(
                {"a": torch.ones(2, device="cpu"), "b": torch.ones(0, 3, device="cpu")}
            ),
            "objects": ops.gather_object([accelerator.process_index]),
            "first": ops.broadcast_object_list([accelerator.process_index]),
            "triggered": accelerator.check_trigger(),
        }
        accelerator.wait_for_everyone()
    return values["tensors"]["a"].tolist(), values["objects"], values["first"], values["triggered"]


def test_the_default_device_is_no_concern_of_what_ranks_exchange(run_processes):
    assert ranks(run_processes, gather_all_kinds, "meta") == [([1.0] * 4, [0, 1], [0], False)] * 2


def gather_by_other_keys(accelerator):
    keys = [1, "1"] if accelerator.is_main_process else ["1", 1]
    with pytest.raises(CollectiveError, match="ranks passed different inputs") as error:
        accelerator.gather({key: torch.ones(1) for key in keys})
    return str(error.value)


def test_keys_that_only_read_alike_are_different(run_processes):
    for told in ranks(run_processes, gather_by_other_keys):
        assert "rank 0: gather of dict; [1] (1,) float32; ['1']" in told
        assert "rank 1: gather of dict; ['1'] (1,) float32; [1]" in told
