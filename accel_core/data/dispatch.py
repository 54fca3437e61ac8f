"""One process reads for all: round by round, every reader is handed its batch.

Batches may be anything that pickles. Their tensors travel as they lie in memory, beside the pickle.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from accel_core.data.position import Drawn, Progress
from accel_core.data.sharding import COMPLETE
from accel_core.distributed.exchange import collective_call
from accel_core.distributed.tensor_bytes import bytes_of, name_of, tensor_from
from accel_core.errors import CollectiveError

if TYPE_CHECKING:
    from accel_core.contract.run import Run

__all__ = ["SOURCE", "Round", "dispatched"]

SOURCE: Final = 0
"""The rank that reads."""
_LENGTH: Final = 8


@frozen
class Round:
    """What readers take together.

    batches: of each reader that has one; packed, while it travels. real: samples that are no padding,
    or COMPLETE. following: readers that have a batch in the next round. drawn: as in `Progress`.
    """

    batches: Sequence[Any] = ()
    real: int = COMPLETE
    following: int = 0
    drawn: Drawn = None
    failure: str | None = None


def dispatched(run: Run, progress: Progress, rounds: Iterator[Round] | None, *, pin: bool) -> Iterator[Any]:
    """This reader's batches. `rounds`: on the rank that reads; pin: put tensors into pinned memory.

    Collective, each time. What reading fails with is raised there, and told to all other ranks.

    Raises:
        CollectiveError: on those ranks.
    """
    reader, number, following = run.topology.reader, progress.count, run.topology.readers
    while following:
        found = _receive(run) if rounds is None else _read(run, rounds)
        following = found.following
        progress.drawn = progress.drawn if found.drawn is None else found.drawn
        if reader >= len(found.batches):
            continue  # this reader has run out, though others have not; or there is nothing at all
        number += 1
        progress.following = following
        if found.real != COMPLETE:
            progress.padded[number] = found.real
        if reader >= following:
            progress.total = number
        batch = found.batches[reader]
        yield _unpacked(*batch, pin=pin) if rounds is None else batch


def _read(run: Run, rounds: Iterator[Round]) -> Round:
    try:
        found = next(rounds, Round())
        message = _packed(found)
    except Exception as error:  # whatever a dataset raises: the others wait, and have to be told
        told = "".join(traceback.format_exception_only(error)).strip()  # a worker's has its traceback in it
        _send(run, _packed(Round(failure=told.splitlines()[-1])))
        raise
    _send(run, message)
    return found


def _receive(run: Run) -> Round:
    memory = _send(run, None).numpy().data
    start = _LENGTH + int.from_bytes(memory[:_LENGTH], "little")
    found: Round = pickle.loads(memory[_LENGTH:start])  # noqa: S301 - of our own rank
    if found.failure is not None:
        raise CollectiveError(
            f"dispatch_batches: rank {SOURCE}, which reads for all, has failed with {found.failure}\n"
            f"see the traceback of rank {SOURCE}",
            operation="dispatch_batches",
        )
    return evolve(found, batches=[(memory[start:], *packed) for packed in found.batches])


def _packed(found: Round) -> Tensor:
    """(b,) uint8: the length of a pickled round; that round, its batches as (pickle, places); memory."""
    memory: list[memoryview] = []
    batches, size = [], 0
    for batch in found.batches:
        pickler = _Pickler(stream := io.BytesIO())
        pickler.dump(batch)
        places = []
        for tensor in pickler.tensors:
            places.append((name_of(tensor.dtype), tuple(tensor.shape), size))
            memory.append(bytes_of(tensor))
            size += len(memory[-1])
        batches.append((stream.getvalue(), places))
    head = pickle.dumps(evolve(found, batches=batches))
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
    """Pickles all but plain tensors, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


def _send(run: Run, message: Tensor | None) -> Tensor:
    with collective_call(run, "world", "the next batch (dispatch_batches)", None, objects=True) as call:
        return call.one_payload(message, SOURCE)
