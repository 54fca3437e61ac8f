"""Read in one process for all: round by round, every reader is handed its batch.

Batches may be anything that pickles. Their tensors travel as raw memory beside the pickle.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from accel_core.data.position import Drawn, Progress
from accel_core.data.sharding import NO_PADDING, batched
from accel_core.distributed.exchange import collective_call
from accel_core.distributed.tensor_bytes import bytes_of, name_of, tensor_from
from accel_core.errors import CollectiveError

if TYPE_CHECKING:
    from accel_core.contract.run import Run

SOURCE: Final = 0
"""The rank that reads."""
_LENGTH: Final = 8


@frozen
class Round:
    """The batches that readers take together.

    batches: of each reader that has one; packed, while the round travels. real_samples: those that are not
    padding, or NO_PADDING. following: readers that have a batch in the next round. drawn: as in `Position`,
    in an iteration's first round.
    """

    batches: Sequence[Any] = ()
    real_samples: int = NO_PADDING
    following: int = 0
    drawn: Drawn = None
    failure: str | None = None


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
        yield Round(*shares, len(following[0]))


def dispatched(run: Run, progress: Progress, rounds: Iterator[Round] | None, *, pin: bool) -> Iterator[Any]:
    """Yield this reader's batches. Each of them is collective.

    rounds: on the rank that reads. pin: put tensors into pinned memory.
    An error while reading is raised on the rank that reads, and told to all other ranks.

    Raises:
        CollectiveError: on those ranks.
    """
    reader, following = run.topology.reader, run.topology.readers
    number = dealt = 0
    while following:
        # Ranks in different loops would deal out a mixture: the words of their calls differ.
        operation = f"the next batch (dispatch_batches), round {dealt} of epoch {progress.epoch}"
        dealt += 1
        current = _receive(run, operation) if rounds is None else _read(run, rounds, operation)
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
        yield _unpacked(*batch, pin=pin) if rounds is None else batch


def _read(run: Run, rounds: Iterator[Round], operation: str) -> Round:
    try:
        current = next(rounds, Round())
        message = _packed(current)
    except BaseException as error:  # Ctrl-C too: the other ranks wait to be told
        # A worker's error carries its traceback in its text: the last line says what it was.
        told = "".join(traceback.format_exception_only(error)).strip()
        _send(run, _packed(Round(failure=told.splitlines()[-1])), operation)
        raise
    _send(run, message, operation)
    return current


def _receive(run: Run, operation: str) -> Round:
    memory = _send(run, None, operation).numpy().data
    start = _LENGTH + int.from_bytes(memory[:_LENGTH], "little")
    current: Round = pickle.loads(memory[_LENGTH:start])  # noqa: S301 - of our own rank
    if current.failure is not None:
        raise CollectiveError(
            f"dispatch_batches: rank {SOURCE}, which reads for all, has failed with {current.failure}\n"
            f"see the traceback of rank {SOURCE}",
            operation="dispatch_batches",
        )
    return evolve(current, batches=[(memory[start:], *packed) for packed in current.batches])


def _packed(current: Round) -> Tensor:
    """Pack a round into a tensor (b,) uint8.

    It holds the length of the pickled round, that pickle, and the memory of all tensors. In the pickle, a
    batch is (its own pickle, places of its tensors in the memory).
    """
    memory: list[memoryview] = []
    batches, size = [], 0
    for batch in current.batches:
        pickler = _Pickler(stream := io.BytesIO())
        pickler.dump(batch)
        places = []
        for tensor in pickler.tensors:
            places.append((name_of(tensor.dtype), tuple(tensor.shape), size))
            memory.append(bytes_of(tensor))
            size += len(memory[-1])
        batches.append((stream.getvalue(), places))
    head = pickle.dumps(evolve(current, batches=batches))
    return torch.frombuffer(
        bytearray().join([len(head).to_bytes(_LENGTH, "little"), head, *memory]), dtype=torch.uint8
    )


def _unpacked(memory: memoryview, batch: bytes, places: Sequence[Any], *, pin: bool) -> Any:
    copy = Tensor.pin_memory if pin else Tensor.clone  # a view would keep all readers' batches alive
    unpickler = pickle.Unpickler(io.BytesIO(batch))  # noqa: S301 - of our own rank
    tensors = [copy(tensor_from(memory, *place)) for place in places]
    unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign]
    return unpickler.load()


class _Pickler(pickle.Pickler):
    """Pickles everything but plain tensors, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


def _send(run: Run, message: Tensor | None, operation: str) -> Tensor:
    with collective_call(run, "world", operation, None, objects=True) as call:
        return call.one_payload(message, SOURCE)
