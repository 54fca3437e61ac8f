"""One operation of several ranks: they see that all of them make it, and alike, before anybody waits.

Where a group carries CPU tensors, an operation begins with one exchange of fixed size: a digest of
all that must be equal, in which a small payload travels along. On other devices ranks are compared
in debug mode only (ACCEL_DEBUG=1 or ACCELERATE_DEBUG_MODE=1).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import torch
from torch import Tensor

from accel_core.contract.run import current
from accel_core.contract.world import DOING
from accel_core.distributed.nested import describe, leaves, walk
from accel_core.distributed.packing import ALIGNMENT, Plan, digest, plan
from accel_core.errors import CollectiveError

if TYPE_CHECKING:
    from accel_core.contract.run import Run

__all__ = ["Call", "calling", "live"]

INLINE_BYTES: Final = 16384
TABLE_BYTES: Final = 65536
"""Payload that travels with the digest, of a rank and of all: less than what a second latency costs."""
SHOWN: Final = 4
"""Places shown of a structure."""
_HEAD_BYTES: Final = 16
_REFUSED: Final = 0
"""The digest of a rank that cannot take part."""


def live(run: Run | None) -> Run:
    """The run that was given, else the only live one."""
    if run is not None:
        return run
    return current()


class Call:
    """One operation as this rank makes it, inside `calling`.

    objects: it moves picklable objects, for which the world has a group on the CPU.
    at: where in the data it is made, which must be equal too.
    """

    def __init__(
        self, run: Run, dim: str, operation: str, tree: Any, *, objects: bool = False, at: str = ""
    ) -> None:
        self.run, self.dim, self.operation, self.tree = run, dim, operation, tree
        self.at = at
        self.refusal = ""
        on_cpu = run.device.type == "cpu"
        self.council = run.collectives("control" if dim == "world" and not on_cpu else dim)
        """Where ranks are compared: if there is one, a group that says who did not come."""
        self.collectives = self.council if objects else run.collectives(dim)
        self.size = self.collectives.size
        self.meets = on_cpu or (objects and dim == "world")

    def __str__(self) -> str:
        found = describe(self.tree)
        tensors = [place for place, text in found.items() if text.startswith("(")]
        return _text(self.operation + self.at, found, tensors or list(found))

    @contextmanager
    def local(self) -> Iterator[None]:
        """Around what may fail on this rank alone, which the others then hear of instead of waiting."""
        try:
            yield
        except Exception as error:  # whatever it is, it goes on here
            self.refusal = str(error).partition("\n")[0]
            if self.size > 1:
                self._meet(_REFUSED, 0) if self.meets else self._compare(_REFUSED)
            raise

    def check_rank(self, rank: int) -> None:
        """Raises ValueError: this operation has no such rank."""
        with self.local():
            if not 0 <= rank < self.size:
                raise ValueError(f"{self.operation}: there are ranks 0 to {self.size - 1} only")

    def tensors(self, wired: Callable[[Tensor], Tensor] | None = None) -> tuple[list[Tensor], Plan]:
        """The structure's tensors, as `wired` sends them, on the run's device; and their plan.

        Raises:
            CollectiveError: another rank raised what follows.
            TypeError: a leaf is no plain tensor; or what `wired` raises.
            ValueError: the tensors are on several devices, or not on the run's (nor the CPU).
        """
        with self.local():
            tensors, structure = leaves(self.tree, self.operation)
            if wired is not None:
                tensors = [wired(tensor) for tensor in tensors]
            devices = {tensor.device for tensor in tensors}
            if len(devices) > 1 or not devices <= {self.run.device, torch.device("cpu")}:
                raise ValueError(self._mixed())
            if self.size > 1 and self.run.device not in devices:
                tensors = [tensor.to(self.run.device) for tensor in tensors]
            shapes, dtypes = tuple([each.shape for each in tensors]), tuple([each.dtype for each in tensors])
            return tensors, plan(self.operation, structure, shapes, dtypes, self.size)

    def exchange(self, plan: Plan, tensors: Sequence[Tensor]) -> tuple[Tensor | None, Tensor]:
        """Check that all ranks bring the like, and let small tensors travel along.

        Returns ((ranks, bytes) of all, nothing) if they were small, else (None, this rank's (bytes,)).

        Raises:
            CollectiveError: they do not; it shows what each rank brought.
        """
        if self.meets:
            mine = plan.digest ^ crc32(self.at.encode())
            _, table = self._meet(mine, plan.size, lambda into: plan.pack(tensors, into))
            if plan.size <= table.shape[1]:
                return table[:, : plan.size], table[0, :0]
        else:
            self._compare(plan.digest ^ crc32(self.at.encode()))
        payload = torch.empty(plan.size, dtype=torch.uint8, device=self.run.device)
        plan.pack(tensors, payload)
        return None if plan.size else payload.view(self.size, 0), payload

    def all_objects(self, value: Any, *agreed: Any) -> list[Any]:
        """Every rank's picklable value, in rank order. `agreed`: what must be equal, as `digest` takes it.

        Raises:
            CollectiveError: ranks differ in operation or `agreed`, or one cannot pickle its value.
        """
        if self.size == 1:
            return [value]
        if not self.meets:
            return list(self.collectives.all_gather_object(value))
        payload = self._pickled(value)
        lengths, table = self._meet(
            digest(self.operation, self.at, *agreed), len(payload), lambda into: into.copy_(payload)
        )
        if max(lengths) > table.shape[1]:
            padded = torch.cat([payload, payload.new_empty(max(lengths) - len(payload))])
            table = self.collectives.all_gather(padded).view(self.size, -1)
        return [_unpickled(row[:length]) for row, length in zip(table, lengths, strict=True)]

    def one_object(self, value: Any, source: int) -> Any:
        """The picklable value of the group's rank `source`. Only that rank's must be picklable.

        Raises:
            CollectiveError: ranks differ in operation, or `source` cannot pickle its value.
        """
        if self.size == 1:
            return value
        if not self.meets:
            return self.collectives.broadcast_object(value, source)
        mine = self.collectives.rank == source
        sent = self.one_payload(self._pickled(value) if mine else None, source)
        return value if mine else _unpickled(sent)

    def one_payload(self, payload: Tensor | None, source: int) -> Tensor:
        """The bytes of the group's rank `source`, where ranks meet; the others bring None.

        Raises:
            CollectiveError: ranks differ in operation.
        """
        mine = torch.empty(0, dtype=torch.uint8) if payload is None else payload
        lengths, table = self._meet(digest(self.operation), len(mine), lambda into: into.copy_(mine))
        if lengths[source] <= table.shape[1]:
            return table[source, : lengths[source]]
        sent = mine.new_empty(lengths[source]) if payload is None else payload
        return self.collectives.broadcast(sent, source)

    def _pickled(self, value: Any) -> Tensor:
        with self.local():
            return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)

    def _meet(
        self, mine: int, length: int, write: Callable[[Tensor], object] = id
    ) -> tuple[list[int], Tensor]:
        """One exchange of fixed size: (payload bytes by rank, (ranks, room) those that fit in)."""
        room = min(INLINE_BYTES, TABLE_BYTES // self.size) // ALIGNMENT * ALIGNMENT
        head = torch.empty(_HEAD_BYTES + room, dtype=torch.uint8)
        head[:_HEAD_BYTES].view(torch.int64).copy_(torch.tensor([mine, length]))
        if length <= room:
            write(head[_HEAD_BYTES : _HEAD_BYTES + length])
        table = self.council.all_gather(head).view(self.size, -1)
        heads = table[:, :_HEAD_BYTES].view(torch.int64).tolist()
        if any(other != mine for other, _ in heads):
            raise self._disagreement()
        return [each for _, each in heads], table[:, _HEAD_BYTES:]

    def _compare(self, mine: int) -> None:
        """What `_meet` sees, in debug mode only."""
        if _debugging() and self.dim == "world":
            self._meet(mine, 0)
        elif _debugging() and any(other != mine for other in self.council.all_gather_object(mine)):
            raise self._disagreement()

    def _disagreement(self) -> CollectiveError:
        """Says where the ranks differ. They all know that they do, and so all come here."""
        every = self.council.all_gather_object((self.operation + self.at, describe(self.tree), self.refusal))
        places = list(dict.fromkeys(place for _, found, _ in every for place in found))
        different = [place for place in places if len({found.get(place) for _, found, _ in every}) > 1]
        texts = [
            refusal or _text(operation, found, different or list(found))
            for operation, found, refusal in every
        ]
        return CollectiveError(
            f"{self.operation}: the ranks did not bring the same\n"
            + "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
            + "\ncall it on all ranks alike; pad_across_processes makes shapes equal",
            operation=self.operation,
            found=texts,
        )

    def _mixed(self) -> str:
        one_each = {value.device: place for place, value in walk(self.tree) if isinstance(value, Tensor)}
        listed = ", ".join(f"{place or 'it'} is on {device}" for device, place in one_each.items())
        return (
            f"{self.operation}: {listed}; this run is on {self.run.device}\n"
            "move them to one device first: ops.send_to_device(data, accelerator.device)"
        )


@contextmanager
def calling(
    run: Run, dim: str, operation: str, tree: Any, *, objects: bool = False, at: str = ""
) -> Iterator[Call]:
    """A `Call`: inside, no gradients, and failures name it.

    A generator, since Ctrl-C may come before a method `__exit__` has done anything.
    """
    call = Call(run, dim, operation, tree, objects=objects, at=at)
    enabled, before = torch.is_grad_enabled(), DOING.get()
    try:
        torch._C._set_grad_enabled(False)
        DOING.set(call)
        yield call
    finally:
        try:
            torch._C._set_grad_enabled(enabled)
        finally:
            DOING.set(before)


def _text(operation: str, found: Mapping[str, str], places: Sequence[str]) -> str:
    shown = [f"{place} {found[place]}".strip() for place in places if place in found]
    more = f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    if shown == ["NoneType"]:
        return operation
    return f"{operation} of {'; '.join(shown[:SHOWN]) or 'nothing there'}{more}"


def _unpickled(payload: Tensor) -> Any:
    return pickle.loads(payload.contiguous().numpy().tobytes())  # noqa: S301 - of our own ranks


def _debugging() -> bool:
    return any(os.environ.get(name) == "1" for name in ("ACCEL_DEBUG", "ACCELERATE_DEBUG_MODE"))
