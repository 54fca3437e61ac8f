"""Checksums of replicas: any byte that differs shows, wherever it is computed."""

from __future__ import annotations

import copy
from itertools import permutations

import pytest
import torch
from accel_core.checkpoint.replicas import Replicas, checksums, sums
from xxhash import xxh3_64_intdigest

from accel_core.checkpoint import replicas as module
from accel_core.storage.tensor_bytes import bytes_of

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128, torch.int4, torch.uint1),
]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (64, 33)]


def both(tensor):
    """As on the CPU, and as on a device."""
    return checksums([tensor]), [each.item() for each in sums([tensor])]


def random(shape, dtype):
    torch.manual_seed(0)
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_byte_counts(dtype, shape):
    tensor = random(shape, dtype)
    before = both(tensor)
    for at in range(0, tensor.nbytes, max(1, tensor.nbytes // 20)):
        changed = torch.frombuffer(bytearray(bytes_of(tensor)), dtype=torch.uint8)
        changed[at] ^= 1
        for one, other in zip(both(changed.view(dtype).view(shape)), before, strict=True):
            assert one != other


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: -tensor,
        lambda tensor: tensor.flip(0),
        lambda tensor: tensor.roll(1, 1),
        lambda tensor: tensor.roll(1, 0),
        lambda tensor: torch.cat([-tensor[:2], tensor[2:]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_what_a_plain_sum_does_not_see_counts_too(change, dtype):
    tensor = torch.randn(64, 64, dtype=dtype)
    for one, other in zip(both(change(tensor).contiguous()), both(tensor), strict=True):
        assert one != other


@pytest.mark.parametrize("half", [0, 1])
def test_halves_of_words_that_change_places_count(half):
    tensor = random((64,), torch.int64)
    changed = tensor.clone()
    halves = changed.view(torch.int32).view(64, 2)
    halves[:, half] = halves[:, half].roll(1)
    for one, other in zip(both(changed), both(tensor), strict=True):
        assert one != other


def test_a_sign_that_changes_its_place_counts_wherever_it_goes():
    found = []
    for place in range(1, 64):
        tensor = torch.ones(64, dtype=torch.float64)
        tensor[[0, place]] = -1
        found.append(both(tensor))
    for each in zip(*found, strict=True):
        assert len({*map(tuple, each)}) == 63


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32], ids=str)
def test_small_whole_numbers_count_in_any_order(dtype):
    """Sums weighted by 1, 3, 5 were the same for [3, 0] and [0, 1], and for one in a hundred permutations."""
    orders = permutations(range(6))
    found = [both(torch.tensor(order, dtype=dtype)) for order in [*orders, (3, 0), (0, 1)]]
    for each in zip(*found, strict=True):
        assert len({*map(tuple, each)}) == 720 + 2


def test_each_byte_of_tensors_that_a_device_reads_in_pieces_counts(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 3)
    tensors = [random((size,), torch.uint8) for size in (5, 16, 40, 1, 67)]
    found = {tuple(each.item() for each in sums(tensors))}
    for tensor in tensors:
        for at in range(len(tensor)):
            tensor[at] ^= 1
            found.add(tuple(each.item() for each in sums(tensors)))
            tensor[at] ^= 1
    assert len(found) == 1 + 5 + 16 + 40 + 1 + 67
    assert {len(each) for each in found} == {2 * 6}  # 129 bytes, 24 at a time


@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor.t(),
        lambda tensor: tensor[1:, 1:],
        lambda tensor: tensor.reshape(-1)[1:],
        lambda tensor: tensor.reshape(-1)[7:15],
        lambda tensor: tensor[::2],
        lambda tensor: tensor[0].expand(4, -1),
    ],
)
def test_memory_order_and_alignment_do_not(view):
    tensor = view(random((9, 15), torch.int16))
    assert both(tensor) == both(tensor.clone(memory_format=torch.contiguous_format))


def test_conjugated_lazily_or_not_it_is_the_same():
    tensor = random((5,), torch.complex64)
    assert both(tensor.conj()) == both(tensor.conj().resolve_conj())


@pytest.mark.parametrize("count", [2, 3, 8])
def test_ranks_of_another_number_of_threads_have_the_same(count, monkeypatch):
    tensors = [random((size,), torch.float32) for size in range(1, 6)]
    alone = [*map(xxh3_64_intdigest, map(bytes_of, tensors))]
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert checksums(tensors) == alone


def test_small_ones_are_read_together_and_any_of_them_counts():
    tensors = [random(shape, dtype) for dtype in DTYPES for shape in SHAPES]
    replicas = Replicas({})
    before = replicas._checksum("", tensors)
    assert replicas._checksum("", copy.deepcopy(tensors)) == before
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            changed = torch.frombuffer(bytearray(bytes_of(tensor)), dtype=torch.uint8)
            changed[-1] ^= 1
            others = [
                *tensors[:number],
                changed.view(tensor.dtype).view(tensor.shape),
                *tensors[number + 1 :],
            ]
            assert replicas._checksum("", others) != before
