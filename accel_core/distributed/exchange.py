"""One operation of several ranks, compared before any rank waits inside it.

Which group compares the ranks and which one carries the data depends on the run's device, on what is
moved, and on the mesh dimension:

| run's device | moved | over | ranks are compared in | data travel in | compared |
|---|---|---|---|---|---|
| CPU | anything | any dimension | its group | its group | always |
| other | objects | world | the control group | the control group | always |
| other | tensors | world | the control group | the world's group | in debug mode |
| other | anything | another dimension | its group | its group | in debug mode |

The control group carries CPU tensors, and can name the ranks that did not come. To compare, ranks exchange
headers: one `all_gather` of a fixed size, of a digest of all that must be equal, in which a small payload
travels along. Debug mode is ACCEL_DEBUG=1 or ACCELERATE_DEBUG_MODE=1.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import torch
from torch import Tensor

from accel_core.contract.world import current_operation
from accel_core.distributed.nested import describe, leaves
from accel_core.distributed.packing import ALIGNMENT, Plan, digest, make_plan
from accel_core.errors import CollectiveError

if TYPE_CHECKING:
    from accel_core.contract.run import Run

INLINE_BYTES: Final = 16384
TABLE_BYTES: Final = 65536
"""Bytes of payload that travel with a header, of one rank and of all.

They cost less than a second latency.
"""
SHOWN: Final = 4
"""Places of a structure that a message shows."""
_CPU: Final = torch.device("cpu")
_HEAD: Final = struct.Struct("=qq")
"""Of a header: the digest, and the payload's bytes."""


class CollectiveCall:
    """One operation as this rank makes it, inside `collective_call`.

    Args:
        run: whose groups are used.
        dim: the mesh dimension, or "world".
        operation: its name, for errors.
        tree: the nested structure that this rank passes.
        objects: True for picklable objects, which travel in CPU tensors.
        at: the position in the data where the call is made, which must be equal on all ranks too.
    """

    def __init__(
        self, run: Run, dim: str, operation: str, tree: Any, *, objects: bool = False, at: str = ""
    ) -> None:
        self.run, self.dim, self.operation, self.tree, self.at = run, dim, operation, tree, at
        self.passed: list[Tensor] = []
        """The structure's tensors as they are, once `tensors` was called."""
        on_cpu = run.device.type == "cpu"
        self.compare_group = run.collectives("control" if dim == "world" and not on_cpu else dim)
        self.data_group = self.compare_group if objects else run.collectives(dim)
        self.size = self.data_group.size
        self.compares_always = on_cpu or (objects and dim == "world")

    def __str__(self) -> str:
        texts = describe(self.tree)
        tensors = [place for place, text in texts.items() if text.startswith("(")]
        return summary(self.operation + self.at, texts, tensors or list(texts))

    def tensors(self, wired: Callable[[Tensor], Tensor] | None = None) -> tuple[list[Tensor], Plan]:
        """Return the structure's tensors and their plan.

        Tensors are as `wired` sends them; if there are other ranks, on the run's device.

        Raises:
            TypeError: a leaf is not a plain tensor; or what `wired` raises.
        """
        tensors, structure = leaves(self.tree, self.operation)
        self.passed = tensors
        if wired is not None:
            tensors = [wired(tensor) for tensor in tensors]
        if self.size > 1 and {tensor.device for tensor in tensors} != {self.run.device}:
            tensors = [tensor.to(self.run.device) for tensor in tensors]
        shapes, dtypes = tuple([tensor.shape for tensor in tensors]), tuple([t.dtype for t in tensors])
        return tensors, make_plan(self.operation, structure, shapes, dtypes, self.size)

    def exchange(self, plan: Plan, tensors: Sequence[Tensor]) -> Tensor | None:
        """Check that all ranks pass alike tensors; small ones travel along.

        Returns (ranks, the plan's bytes or more), or None if they have still to be sent (see `packed`).

        Raises:
            CollectiveError: ranks passed different inputs; it shows those of each rank.
        """
        agreed = plan.digest ^ crc32(self.at.encode())
        if not self.compares_always:
            if _debugging() and self.dim == "world":
                self._exchange_headers(agreed, 0, lambda into: into)
            elif _debugging() and any(x != agreed for x in self.compare_group.all_gather_object(agreed)):
                raise self._disagreement()
            return None if plan.size else torch.empty(self.size, 0, dtype=torch.uint8, device=self.run.device)
        _, table = self._exchange_headers(agreed, plan.size, lambda into: plan.pack(tensors, into))
        return table if plan.size <= table.shape[1] else None

    def packed(self, plan: Plan, tensors: Sequence[Tensor], *, shares: bool = False) -> Tensor:
        """Return this rank's tensors as (bytes,) on the run's device.

        shares: nobody writes to the bytes, so they may be those of a tensor.
        """
        if shares and len(tensors) == 1:
            return tensors[0].resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        payload = torch.empty(plan.size, dtype=torch.uint8, device=self.run.device)
        plan.pack(tensors, payload)
        return payload

    def all_objects(self, value: Any, *agreed: Any) -> list[Any]:
        """Return every rank's picklable value, in rank order.

        agreed: what must be equal on all ranks, as `digest` takes it.

        Raises:
            CollectiveError: ranks differ in operation or `agreed`.
        """
        if self.size == 1:
            return [value]
        if not self.compares_always:
            return list(self.data_group.all_gather_object(value))
        payload = _pickled(value)
        same = digest(self.operation, self.at, *agreed)
        lengths, table = self._exchange_headers(same, len(payload), lambda into: into.copy_(payload))
        if max(lengths) > table.shape[1]:
            padded = torch.cat([payload, payload.new_empty(max(lengths) - len(payload))])
            table = self.data_group.all_gather(padded).view(self.size, -1)
        return [_unpickled(row[:length]) for row, length in zip(table, lengths, strict=True)]

    def one_object(self, value: Any, source: int) -> Any:
        """Return the picklable value of the group's rank `source`.

        Only that rank's value must be picklable.

        Raises:
            CollectiveError: ranks differ in operation.
        """
        if self.size == 1:
            return value
        if not self.compares_always:
            return self.data_group.broadcast_object(value, source)
        is_source = self.data_group.rank == source
        payload = _pickled(value) if is_source else torch.empty(0, dtype=torch.uint8, device=_CPU)
        lengths, table = self._exchange_headers(
            digest(self.operation), len(payload), lambda into: into.copy_(payload)
        )
        if lengths[source] <= table.shape[1]:
            sent = table[source, : lengths[source]]
        else:
            sent = payload if is_source else payload.new_empty(lengths[source])
            self.data_group.broadcast(sent, source)
        return value if is_source else _unpickled(sent)

    def _exchange_headers(
        self, agreed: int, length: int, write: Callable[[Tensor], object]
    ) -> tuple[list[int], Tensor]:
        """Compare `agreed`, and exchange payloads that fit into a header.

        write: fills the (length,) bytes of this rank's payload.

        Returns the payloads' lengths by rank, and the (ranks, room) bytes that fitted.
        """
        room = min(INLINE_BYTES, TABLE_BYTES // self.size) // ALIGNMENT * ALIGNMENT
        header = torch.empty(_HEAD.size + room, dtype=torch.uint8, device=_CPU)
        _HEAD.pack_into(header.numpy().data, 0, agreed, length)
        if length <= room:
            write(header.narrow(0, _HEAD.size, length))
        received = self.compare_group.all_gather(header)
        words, step = received.numpy().data, len(header)
        heads = [_HEAD.unpack_from(words, rank * step) for rank in range(self.size)]
        if any(other != agreed for other, _ in heads):
            raise self._disagreement()
        payloads = received.view(self.size, -1).narrow(1, _HEAD.size, room)
        return [other_length for _, other_length in heads], payloads

    def _disagreement(self) -> CollectiveError:
        """Return the error that shows where ranks differ.

        Collective: all ranks notice the difference, and call it.
        """
        of_ranks = self.compare_group.all_gather_object((self.operation + self.at, describe(self.tree)))
        places = list(dict.fromkeys(place for _, texts in of_ranks for place in texts))
        different = [place for place in places if len({texts.get(place) for _, texts in of_ranks}) > 1]
        told = [summary(operation, texts, different or list(texts)) for operation, texts in of_ranks]
        return CollectiveError(
            f"{self.operation}: ranks passed different inputs\n"
            + "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(told))
            + "\ncall it on all ranks alike; pad_across_processes makes shapes equal",
            operation=self.operation,
            found=told,
        )


@contextmanager
def collective_call(
    run: Run, dim: str, operation: str, tree: Any, *, objects: bool = False, at: str = ""
) -> Iterator[CollectiveCall]:
    """Give a `CollectiveCall`, with gradients off. Errors of collectives inside name it."""
    call = CollectiveCall(run, dim, operation, tree, objects=objects, at=at)
    observe = run.observe_collective if call.size > 1 else None  # alone, nobody waits
    if observe is not None:
        observe(operation, False)
    before = current_operation.set(call)
    try:
        with torch.no_grad():
            yield call
    finally:
        current_operation.reset(before)
        if observe is not None:
            observe(operation, True)


def summary(operation: str, texts: Mapping[str, str], places: Sequence[str]) -> str:
    """Name an operation, with what these places gave to it, cut."""
    shown = [f"{place} {texts[place]}".strip() for place in places if place in texts]
    more = f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    if shown == ["NoneType"]:
        return operation
    return f"{operation} of {'; '.join(shown[:SHOWN]) or 'nothing there'}{more}"


def _pickled(value: Any) -> Tensor:
    from accel_core.storage.tensor_bytes import pickled  # late: start-up need not wait for it

    return torch.frombuffer(bytearray(pickled(value)), dtype=torch.uint8)


def _unpickled(payload: Tensor) -> Any:
    return pickle.loads(payload.contiguous().numpy().tobytes())  # noqa: S301 - of our own ranks


def _debugging() -> bool:
    return any(os.environ.get(name) == "1" for name in ("ACCEL_DEBUG", "ACCELERATE_DEBUG_MODE"))
