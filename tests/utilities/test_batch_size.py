"""find_executable_batch_size: what counts as no memory, what is tried, and that ranks agree."""

from __future__ import annotations

import gc
import resource
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accel_core import (
    Accelerator,
    AccelError,
    InitProcessGroupKwargs,
    find_executable_batch_size,
    release_memory,
)
from accel_core.accelerator.memory import is_out_of_memory
from accel_testing import ProcessError


def fits(limit, tried, error=torch.OutOfMemoryError):
    def function(batch_size, *args, **kwargs):
        tried.append(batch_size)
        if batch_size > limit:
            raise error("tried to allocate more than there is: out of memory")
        return batch_size, args, kwargs

    return function


def lower(at):
    at[0] -= 10
    return at[0]


def test_the_size_is_halved_until_it_fits():
    tried = []
    found = find_executable_batch_size(fits(30, tried), starting_batch_size=200)("model", lr=1)

    assert tried == [200, 100, 50, 25]
    assert found == (25, ("model",), {"lr": 1})


def test_it_is_a_decorator_with_and_without_arguments():
    @find_executable_batch_size
    def plain(batch_size):
        return batch_size

    @find_executable_batch_size(starting_batch_size=8)
    def given(batch_size):
        return batch_size

    assert (plain(), given(), given.__name__) == (128, 8, "given")


@pytest.mark.parametrize("rule", [iter((90, 80, 70)).__next__, [70, 80, 90].pop, lambda at=[100]: lower(at)])
def test_the_rule_may_be_the_users(rule):
    tried = []
    find_executable_batch_size(fits(75, tried), 100, rule)()

    assert tried == [100, 90, 80, 70]


def test_the_error_says_what_was_tried():
    with pytest.raises(
        AccelError,
        match=r"function ran out of memory with each batch size that was tried: 4, 2, 1\nOutOfMemoryError: ",
    ):
        find_executable_batch_size(fits(0, []), starting_batch_size=4)()


def test_other_errors_pass():
    tried = []
    with pytest.raises(RuntimeError, match="shapes"):
        find_executable_batch_size(fits(1, tried, lambda _: RuntimeError("shapes do not match")))()
    assert tried == [128]


def test_giving_the_batch_size_oneself_is_an_error():
    @find_executable_batch_size
    def train(batch_size, model): ...

    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        train(128, "model")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("any words"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_out_of_memory_is_known_by_type_or_words(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes"),
        ValueError("out of memory"),
        KeyError("x"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul with fp8"),
        RuntimeError("cuSPARSELt error: CUSPARSE_STATUS_NOT_SUPPORTED"),
    ],
)
def test_other_things_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def really():
    # The limit is real, and so is torch's error.
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))

    @find_executable_batch_size(starting_batch_size=2**36)
    def allocate(batch_size):
        return torch.empty(batch_size, dtype=torch.uint8).numel()

    return allocate()


def test_memory_that_really_runs_out_is_seen(run_processes):
    (found,) = run_processes(really, world=1)

    assert 2**20 < found < 2**33


def test_what_the_last_attempt_held_is_gone():
    held = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        model = torch.nn.Linear(1, 1)
        alive = [reference() is not None for reference in held]
        held.append(weakref.ref(model))
        if batch_size == 2:
            raise torch.OutOfMemoryError("no")
        return alive

    assert train() == [False]


def test_release_memory_gives_as_many_none():
    model = torch.nn.Linear(1, 1)
    reference = weakref.ref(model)
    other = model
    gc.disable()
    try:
        model, other = release_memory(model, other)
    finally:
        gc.enable()

    assert (model, other, reference()) == (None, None, None)


def agree(limits):
    accelerator = Accelerator(cpu=True)
    tried = []
    found = find_executable_batch_size(fits(limits[accelerator.process_index], tried), 16)()[0]
    again = find_executable_batch_size(fits(16, tried), 16)()[0]
    accelerator.end_training()
    return found, tried, again


@pytest.mark.needs("accel-ddp")
def test_ranks_agree_on_the_smallest(run_processes):
    assert run_processes(agree, (16, 5)) == [(4, [16, 8, 4, 16], 16)] * 2


@pytest.mark.needs("accel-ddp")
def test_ranks_that_fit_say_so_too_if_no_size_fits(run_processes):
    with pytest.raises(ProcessError, match="tried: 16, 8, 4, 2, 1\n"):
        run_processes(agree, (16, 0))


def slowly_read():
    """When this rank has read the votes, if it is slow, and when it leaves."""
    accelerator = Accelerator(cpu=True)
    kind, read = type(accelerator.run.world.store), []
    plain = kind.multi_get

    def slow(*args):
        time.sleep(1)
        votes = plain(*args)
        read.append(time.monotonic())  # the same clock in all processes
        return votes

    if accelerator.process_index == 1:
        kind.multi_get = slow
    find_executable_batch_size(lambda size: size, starting_batch_size=16)()
    return read[:1], time.monotonic()


@pytest.mark.needs("accel-ddp")
def test_the_rank_that_serves_the_votes_leaves_once_all_have_read_them(run_processes):
    """Else a program that ends there fails on the others: their store is gone."""
    (_, left), ([read], _) = run_processes(slowly_read)
    assert left > read


def alone():
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=8))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[timeout])

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size):
        if accelerator.process_index == 1:
            raise torch.OutOfMemoryError("no")
        dist.all_reduce(torch.ones(1))

    try:
        train()
    except AccelError as error:
        return str(error)
    except RuntimeError as error:
        return f"collective: {type(error).__name__}"


@pytest.mark.full
@pytest.mark.needs("accel-ddp")
def test_a_rank_that_fails_inside_a_collective_of_the_others_is_named_not_hung(run_processes):
    waiting, failing = run_processes(alone, timeout=60)

    assert waiting.startswith("collective: ")
    assert "memory ran out on rank 1 at batch size 16, but rank 0 gave no answer in 8 s" in failing
