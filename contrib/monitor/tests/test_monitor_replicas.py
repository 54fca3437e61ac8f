"""The extension `replicas`: whatever drifts apart between ranks is found, and named on all of them."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import replicas_job
import torch

from accel_core import Accelerator
from accel_monitor import ReplicasConfig
from accel_monitor import replicas as module
from accel_monitor.replicas import checksum, sums

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128, torch.int4, torch.uint1),
]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (64, 33)]


# -- what is compared ---------------------------------------------------------------------------------------


@pytest.mark.needs("accel-ddp")
def test_replicas_that_are_equal_stay_unnoticed(run_processes):
    assert run_processes(replicas_job.train, "nothing") == [[""] * 6] * 2


@pytest.mark.needs("accel-ddp")
def test_a_weight_that_has_drifted_is_named_with_its_ranks_on_all_of_them(run_processes):
    for said in run_processes(replicas_job.train, "weight"):
        assert [bool(each) for each in said] == [False] * 3 + [True, False, True]
        assert "unit 'unit0'" in said[3]
        assert "  model/0.weight [0:8, 0:8]: rank(s) 0 differ from rank(s) 1\n" in said[3]
        assert "model/2.bias" not in said[3]


@pytest.mark.needs("accel-ddp")
def test_the_state_of_an_optimizer_is_compared(run_processes):
    for said in run_processes(replicas_job.train, "moment"):
        assert "  optimizer/2.bias/exp_avg [0:8]: rank(s) 0 differ from rank(s) 1\n" in said[3]


@pytest.mark.needs("accel-ddp")
def test_at_most_ten_are_named(run_processes):
    for said in run_processes(replicas_job.train, "all"):
        assert said[3].count("differ from") == 10
        assert "  ... and " in said[3]


@pytest.mark.needs("accel-ddp")
def test_buffers_may_differ_as_the_statistics_of_batch_norm_do(run_processes):
    assert run_processes(replicas_job.train, "buffer") == [[""] * 6] * 2


@pytest.mark.needs("accel-ddp")
def test_a_comparison_is_due_every_so_many_steps(run_processes):
    for said in run_processes(replicas_job.train, "weight", 6, 5):
        assert [bool(each) for each in said] == [False] * 4 + [True, False]


@pytest.mark.needs("accel-ddp")
def test_ranks_that_step_alone_are_compared_once_they_have_averaged(run_processes):
    assert run_processes(replicas_job.train_alone, 2) == [[""] * 3] * 2


@pytest.mark.needs("accel-fsdp")
def test_what_each_rank_has_a_shard_of_is_not_compared(run_processes):
    assert run_processes(replicas_job.train, "weight", 6, 1, "fsdp") == [[""] * 6] * 2


def test_a_rank_alone_compares_nothing_and_nothing_is_compared_unless_it_is_asked_for(tmp_path):
    assert "replicas" not in Accelerator(cpu=True).run.plugins
    assert replicas_job.train("weight", strategy="auto") == [""] * 6
    said = Accelerator(cpu=True, plugins=[ReplicasConfig(every=3)])
    model = said.prepare(torch.nn.Linear(2, 2))
    assert "replicas compares what several ranks hold, every 3 optimizer step(s)" in said.explain()
    del model


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.needs("accel-ddp")
def test_it_conforms_under_a_strategy(tmp_path: Path, conform):
    assert not conform(tmp_path, "ddp+replicas").failed


# -- checksums ----------------------------------------------------------------------------------------------


def both(tensor):
    """As on the CPU, and as on a device."""
    return [checksum([tensor])], [each.item() for each in sums([tensor])]


def as_bytes(tensor):
    return module._as_bytes(tensor).clone()


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
        changed = as_bytes(tensor)
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
        lambda tensor: tensor[:1, 1:2].t(),
        lambda tensor: tensor[0].expand(4, -1),
    ],
)
def test_memory_order_and_alignment_do_not_count(view):
    tensor = view(random((9, 15), torch.int16))
    assert both(tensor) == both(tensor.clone(memory_format=torch.contiguous_format))


def test_conjugated_lazily_or_not_it_is_the_same():
    tensor = random((5,), torch.complex64)
    assert both(tensor.conj()) == both(tensor.conj().resolve_conj())


@pytest.mark.simulated
def test_a_device_adds_up_what_the_host_would(run_processes):
    assert run_processes(replicas_job.on_a_device, world=1) == [True]
