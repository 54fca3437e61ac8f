"""Reading in one process for all ranks, which hands every reader its batch, round by round.

Batches may be any objects that pickle.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen
from torch import Tensor

from accel_core.data.position import Drawn, Progress
from accel_core.data.sharding import NO_PADDING, batched
from accel_core.distributed.exchange import collective_call
from accel_core.distributed.nested import recursively_apply
from accel_core.errors import CollectiveError

if TYPE_CHECKING:
    from accel_core.contract.run import Run

SOURCE: Final = 0
"""The rank that reads."""


@frozen
class Round:
    """The batches that the readers take together.

    Attributes:
        batches: one per reader, in order of readers; the remaining readers have no batch in this round.
        real_samples: number of samples that are not padding, or a mark of `sharding` such as NO_PADDING.
        following: number of readers that have a batch in the next round.
        drawn: source of the epoch's order, as in `Position`; in the first round of an iteration only.
        failure: the error of the rank that reads; "" if reading succeeded.
    """

    batches: Sequence[Any] = ()
    real_samples: int = NO_PADDING
    following: int = 0
    drawn: Drawn = None
    failure: str = ""


def rounds_of_samples(batches: Iterator[Any], progress: Progress, readers: int) -> Iterator[Round]:
    """Yield the rounds of map-style data from `batches`, which holds the batches of all readers in turn."""
    for number, group in enumerate(batched(batches, readers), start=1):
        following = 0 if number == progress.total else progress.readers_with_batch.get(number + 1, readers)
        real_samples = progress.padded.get(number, NO_PADDING)
        yield Round(group, real_samples, following, progress.drawn if number == 1 else None)


def rounds_of_iterable(stated: Iterator[tuple[Any, Any]], progress: Progress) -> Iterator[Round]:
    """Yield an iterable dataset's rounds from pairs (shares, loader state after the shares).

    Reads one pair ahead, since only the end of the pairs tells which round is the last.
    """
    end: Any = (((), NO_PADDING), None)
    for number, ((shares, state), (following, _)) in enumerate(pairwise(chain(stated, [end])), start=1):
        if state is not None:
            progress.states[number] = state
        yield Round(shares[0], shares[1], len(following[0]))


def dispatched(run: Run, progress: Progress, rounds: Iterator[Round] | None, *, pin: bool) -> Iterator[Any]:
    """Yield this reader's batches. Collective: all ranks iterate alike.

    Args:
        run: the run whose readers share the batches.
        progress: the iteration; filled in from the rounds on ranks that do not read.
        rounds: the rounds, on the rank that reads; None on other ranks.
        pin: copy the received tensors into pinned memory.

    Raises:
        CollectiveError: on ranks that do not read, if reading has failed.
    """
    reader, following = run.topology.reader, run.topology.readers
    number = dealt = 0
    while following:
        # Names round and epoch, so that ranks in different loops raise instead of sharing out a mixture.
        operation = f"the next batch (dispatch_batches), round {dealt} of epoch {progress.epoch}"
        dealt += 1
        current: Round = _exchange(run, rounds, operation)
        following = current.following
        progress.drawn = progress.drawn if current.drawn is None else current.drawn
        has_batch = reader < len(current.batches)
        number += has_batch
        if not following:
            progress.ends = number
        if not has_batch:
            continue  # other readers may still have batches, and this rank takes part in their rounds
        if current.real_samples != NO_PADDING:
            progress.padded[number] = current.real_samples
        if reader >= following:
            progress.total = number
        batch = current.batches[reader]
        yield recursively_apply(Tensor.pin_memory, batch) if pin and rounds is None else batch


def _exchange(run: Run, rounds: Iterator[Round] | None, operation: str) -> Any:
    """Return the next round, read by the rank that has `rounds`. Collective."""
    current, error = Round(), None
    try:
        current = next(rounds, current) if rounds is not None else current
    except BaseException as raised:  # Ctrl-C too: the other ranks wait in this exchange
        # An error of a DataLoader worker has the worker's traceback as text; its last line names the error.
        told = "".join(traceback.format_exception_only(raised)).strip()
        current, error = Round(failure=told.splitlines()[-1]), raised
    with collective_call(run, "world", operation, None, objects=True) as call:
        current = call.one_object(current, SOURCE)
    if error is not None:
        raise error
    if current.failure:
        raise CollectiveError(
            f"dispatch_batches: rank {SOURCE}, which reads for all, has failed with {current.failure}\n"
            f"see the traceback of rank {SOURCE}",
            operation="dispatch_batches",
            failed_rank=SOURCE,
        )
    return current
