"""Read in one process for all: round by round, every reader is handed its batch.

Batches may be anything that pickles.
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
    """The batches that readers take together.

    batches: of each reader that has one. real_samples: those that are not padding, or NO_PADDING. following:
    readers that have a batch in the next round. drawn: as in `Position`, in an iteration's first round.
    """

    batches: Sequence[Any] = ()
    real_samples: int = NO_PADDING
    following: int = 0
    drawn: Drawn = None
    failure: str = ""


def rounds_of_samples(batches: Iterator[Any], progress: Progress, readers: int) -> Iterator[Round]:
    """Yield the rounds of map-style data. batches: of all readers in turn."""
    for number, group in enumerate(batched(batches, readers), start=1):
        following = 0 if number == progress.total else progress.readers_with_batch.get(number + 1, readers)
        real_samples = progress.padded.get(number, NO_PADDING)
        yield Round(group, real_samples, following, progress.drawn if number == 1 else None)


def rounds_of_iterable(stated: Iterator[tuple[Any, Any]], progress: Progress) -> Iterator[Round]:
    """Yield an iterable dataset's rounds from (shares, loader state after them).

    Its end is known only by reading one ahead.
    """
    end: Any = (((), NO_PADDING), None)
    for number, ((shares, state), (following, _)) in enumerate(pairwise(chain(stated, [end])), start=1):
        if state is not None:
            progress.states[number] = state
        yield Round(shares[0], shares[1], len(following[0]))


def dispatched(run: Run, progress: Progress, rounds: Iterator[Round] | None, *, pin: bool) -> Iterator[Any]:
    """Yield this reader's batches. Each of them is collective.

    rounds: on the rank that reads. pin: put tensors into pinned memory.

    Raises:
        CollectiveError: on the other ranks, if reading has failed.
    """
    reader, following = run.topology.reader, run.topology.readers
    number = dealt = 0
    while following:
        # Ranks in different loops would deal out a mixture: the words of their calls differ.
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
            continue  # this reader has run out, others may not have
        if current.real_samples != NO_PADDING:
            progress.padded[number] = current.real_samples
        if reader >= following:
            progress.total = number
        batch = current.batches[reader]
        yield recursively_apply(Tensor.pin_memory, batch) if pin and rounds is None else batch


def _exchange(run: Run, rounds: Iterator[Round] | None, operation: str) -> Any:
    """Return the next round, which the rank that has `rounds` reads. Collective."""
    current, error = Round(), None
    try:
        current = next(rounds, current) if rounds is not None else current
    except BaseException as raised:  # Ctrl-C too: the other ranks wait to be told
        # A worker's error carries its traceback in its text: the last line says what it was.
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
