"""Release memory, and find a batch size that fits into memory."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_core.contract.run import live
from accel_core.distributed.mailbox import mailbox_of
from accel_core.errors import AccelError

if TYPE_CHECKING:
    from accel_core.contract.run import Run
    from accel_core.storage.protocols import Message

OUT_OF_MEMORY: Final = (
    "out of memory",
    "can't allocate memory",
    "allocation failed",
    "alloc_failed",
    "cudnn_status_not_supported",
)
"""Lower-case phrases of vendors' out-of-memory errors, which are RuntimeErrors."""

_searches = count()


def release_memory(*objects: Any) -> list[None]:
    """Release unused memory; return as many None as arguments.

    `a, b = release_memory(a, b)` drops the caller's references too.
    """
    given = len(objects)
    del objects
    _give_back()
    return [None] * given


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate `function(batch_size, ...)` to run again with half the batch size if memory runs out.

    Each call starts at `starting_batch_size`. The function must first release the objects of the last
    attempt (`accelerator.free_memory()`), and create all objects that it trains.

    With several processes the ranks agree after each attempt: if memory ran out on any rank, all ranks
    continue with the next size. All ranks must therefore call the function, with an Accelerator made before.
    A rank that runs out of memory while others wait for it inside a collective raises after
    `process_group.timeout`.

    Args:
        function: a function whose first argument is the batch size.
        starting_batch_size: the first size to try, 1 or more.
        reduce_batch_size_fn: returns the next size; called without arguments. Default: half.

    Raises:
        AccelError: no size fits, or the ranks could not agree.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        run = next((run for run in live() if run.world.store is not None), None)
        number, tried, size = next(_searches), list[int](), starting_batch_size
        reason = "memory ran out on another rank"
        while size >= 1:
            tried.append(size)
            _give_back()
            result, lacks = None, False
            try:
                result = function(size, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:  # not kept: its frames hold the attempt's tensors
                if not is_out_of_memory(error):
                    raise
                reason, lacks = f"{type(error).__name__}: {error}", True
            if not (lacks if run is None else _any_lacks(run, f"{number}/{len(tried)}", size, lacks=lacks)):
                return result
            size = size // 2 if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise AccelError(
            f"find_executable_batch_size: {function.__qualname__} ran out of memory with each batch size"
            f" that was tried: {', '.join(map(str, tried))}\n{reason}\n"
            "take a smaller model or shorter inputs, or accumulate gradients over smaller batches"
        )

    return search


def _any_lacks(run: Run, attempt: str, size: int, *, lacks: bool) -> bool:
    """Return True if memory ran out on any rank.

    Ranks vote in the store, because their process groups may be inside a collective.
    """
    rank, ranks = run.world.rank, range(run.world.size)
    votes = mailbox_of(run).under(f"batch_size/{attempt}")
    heard: dict[int, Message | None] = {}
    with suppress(RuntimeError):  # the store went down with the rank that served it: reported below
        votes.put(f"{rank}", {"lacks": lacks})
        heard = votes.wait({each: f"{each}" for each in ranks}, votes.timeout)
    if silent := [each for each in ranks if heard.get(each) is None]:
        raise AccelError(
            f"find_executable_batch_size: {'memory ran out' if lacks else 'the function returned'} on"
            f" rank {rank} at batch size {size}, but rank {silent[0]} gave no answer in"
            f" {votes.timeout:g} s; it may be waiting for others inside a collective\n"
            "start with a smaller starting_batch_size"
        )
    with suppress(RuntimeError):
        votes.put(f"{rank}/has_read", {})
        if rank == 0:  # rank 0 may serve the store, and its program may end next
            votes.wait({each: f"{each}/has_read" for each in ranks}, votes.timeout)
    return any(vote["lacks"] for vote in heard.values() if vote is not None)


def _give_back() -> None:
    gc.collect()
    for run in live():
        empty_cache(run)


def empty_cache(run: Run) -> None:
    """Release the device's cached memory that is not in use."""
    if run.mark_step is not None:
        run.mark_step("state")
    module = torch.get_device_module(run.device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()
