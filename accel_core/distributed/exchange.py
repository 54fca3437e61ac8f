"""Compare the calls of all ranks before an operation starts, and exchange small payloads in the same message.

Calls over "world" meet in the control group, which carries CPU tensors and can name the ranks that did not
come; calls over another mesh dimension meet in the group of that dimension. A rank that calls `gather`
over "world" therefore meets a rank that calls `save_state`.

If the ranks meet on the CPU (a CPU run; objects over "world" on any device), they exchange headers of a fixed
size in one `all_gather`. A header holds a digest of all values that must be equal, and a small payload.
Other calls are compared in debug mode only: ACCEL_DEBUG=1 or ACCELERATE_DEBUG_MODE=1.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from accel_core.contract.world import current_operation
from accel_core.distributed.nested import Description, describe, leaves
from accel_core.distributed.packing import ALIGNMENT, Plan, digest, make_plan
from accel_core.errors import CollectiveError

if TYPE_CHECKING:
    from accel_core.contract.run import Run
    from accel_core.contract.world import Collectives

INLINE_BYTES: Final = 16384
"""Most bytes of payload in one header: their transfer costs less than the latency of a second message."""
TABLE_BYTES: Final = 65536
"""Most bytes of payload in the headers of all ranks."""
SHOWN: Final = 4
"""Most places of a structure that a message shows."""
_CPU: Final = torch.device("cpu")
_HEAD: Final = struct.Struct("=qq")
"""Start of a header: the digest, and the length of the payload in bytes."""


class Call(NamedTuple):
    """One rank's call of an operation that all ranks call; `str(call)` is its name in errors."""

    name: str
    tree: Any = None
    """The nested structure that this rank passes."""
    words: str = ""
    """A description of the input, for calls that pass no structure."""
    at: str = ""
    """The position in the data where the call is made; must be equal on all ranks too."""

    def inputs(self) -> dict[str, Description]:
        """Describe each place of this rank's input."""
        return {"": Description(self.words)} if self.words else describe(self.tree)

    def __str__(self) -> str:
        return _in_words(self.name + self.at, self.inputs())


class CollectiveCall:
    """A call under way, which `collective_call` gives: compares ranks and exchanges their inputs."""

    def __init__(self, run: Run, dim: str, call: Call, *, objects: bool) -> None:
        self._call, self._device, self._is_world = call, run.device, dim == "world"
        self._meeting = run.collectives("control" if self._is_world else dim)
        self._has_headers = run.device.type == "cpu" or (objects and self._is_world)
        self.group = self._meeting if objects else run.collectives(dim)
        """The group for data that do not fit into a header."""
        self.size = self.group.size
        self.passed: list[Tensor] = []
        """The structure's original tensors, after a call of `tensors`."""

    def tensors(self, wired: Callable[[Tensor], Tensor] | None = None) -> tuple[list[Tensor], Plan]:
        """Return the structure's tensors as they are sent, and their plan.

        If there are other ranks, the tensors are on the run's device.

        Args:
            wired: converts a tensor before it is sent.

        Raises:
            TypeError: a leaf is not a plain tensor. Errors of `wired` are raised as they are.
        """
        tensors, structure = leaves(self._call.tree, self._call.name)
        self.passed = tensors
        if wired is not None:
            tensors = [wired(tensor) for tensor in tensors]
        if self.size > 1 and {tensor.device for tensor in tensors} != {self._device}:
            tensors = [tensor.to(self._device) for tensor in tensors]
        shapes, dtypes = tuple([tensor.shape for tensor in tensors]), tuple([t.dtype for t in tensors])
        return tensors, make_plan(self._call.name, structure, shapes, dtypes, self.size)

    def exchange(self, plan: Plan, tensors: Sequence[Tensor]) -> Tensor | None:
        """Check that all ranks pass equal structures, shapes and dtypes; exchange small tensors.

        Returns (ranks, at least the plan's bytes), or None if the tensors must still be sent (see `packed`).

        Raises:
            CollectiveError: ranks differ; the message shows the call of each rank.
        """
        agreed = plan.digest ^ crc32(self._call.at.encode())
        if not self._has_headers:
            self._compare_if_debugging(agreed)
            return None if plan.size else torch.empty(self.size, 0, dtype=torch.uint8, device=self._device)
        _, table = _exchange(
            self._meeting, self._call, agreed, plan.size, lambda into: plan.pack(tensors, into)
        )
        return table if plan.size <= table.shape[1] else None

    def packed(self, plan: Plan, tensors: Sequence[Tensor], *, shares: bool = False) -> Tensor:
        """Return this rank's tensors as (bytes,) on the run's device.

        Args:
            plan: the layout of the bytes.
            tensors: this rank's tensors.
            shares: the bytes are only read, and may share the memory of a tensor.
        """
        if shares and len(tensors) == 1:
            return tensors[0].resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        payload = torch.empty(plan.size, dtype=torch.uint8, device=self._device)
        plan.pack(tensors, payload)
        return payload

    def all_objects(self, value: Any, *agreed: Any) -> list[Any]:
        """Return every rank's picklable value, in rank order.

        Args:
            value: this rank's value.
            agreed: further values that must be equal on all ranks, of types that `digest` takes.

        Raises:
            CollectiveError: ranks differ in the call or `agreed`.
        """
        if self._has_headers:
            return exchange_objects(self._meeting, self._call, value, *agreed)
        self._compare_if_debugging(_digest_of(self._call, *agreed))
        return list(self.group.all_gather_object(value))

    def one_object(self, value: Any, source: int) -> Any:
        """Return the picklable value of the group's rank `source`.

        Only the value of rank `source` must be picklable.

        Raises:
            CollectiveError: ranks differ in the call.
        """
        agreed = _digest_of(self._call)
        if self.size == 1:
            return value
        if not self._has_headers:
            self._compare_if_debugging(agreed)
            return self.group.broadcast_object(value, source)
        is_source = self.group.rank == source
        payload = _pickled(value) if is_source else torch.empty(0, dtype=torch.uint8, device=_CPU)
        lengths, table = _exchange_bytes(self._meeting, self._call, agreed, payload)
        if lengths[source] <= table.shape[1]:
            sent = table[source, : lengths[source]]
        else:
            sent = payload if is_source else payload.new_empty(lengths[source])
            self.group.broadcast(sent, source)
        return value if is_source else _unpickled(sent)

    def _compare_if_debugging(self, agreed: int) -> None:
        if not is_debugging():
            return
        if self._is_world:  # by a header, as the calls on other ranks that this one may meet
            _exchange_bytes(self._meeting, self._call, agreed, torch.empty(0, dtype=torch.uint8, device=_CPU))
        elif any(other != agreed for other in self._meeting.all_gather_object(agreed)):
            raise _disagreement(self._meeting, self._call)


def is_debugging() -> bool:
    """Return whether ranks compare more than they need: ACCEL_DEBUG=1 or ACCELERATE_DEBUG_MODE=1."""
    return any(os.environ.get(name) == "1" for name in ("ACCEL_DEBUG", "ACCELERATE_DEBUG_MODE"))


@contextmanager
def collective_call(
    run: Run, dim: str, name: str, tree: Any, *, objects: bool = False, at: str = ""
) -> Iterator[CollectiveCall]:
    """Give a `CollectiveCall` with gradients off; errors of collectives inside the context name the call.

    Args:
        run: the run whose groups are used.
        dim: the mesh dimension, or "world".
        name: the operation, for errors.
        tree: the nested structure that this rank passes.
        objects: True for picklable objects, which travel in CPU tensors.
        at: see `Call.at`.
    """
    call = Call(name, tree, at=at)
    collective = CollectiveCall(run, dim, call, objects=objects)
    observe = run.observe_collective if collective.size > 1 else None  # a world of one never waits
    if observe is not None:
        observe(name, False)
    before = current_operation.set(call)
    try:
        with torch.no_grad():
            yield collective
    finally:
        current_operation.reset(before)
        if observe is not None:
            observe(name, True)


def exchange_objects(group: Collectives, call: Call, value: Any, *agreed: Any) -> list[Any]:
    """Return the picklable value of each rank, in rank order.

    Args:
        group: a group for CPU tensors.
        call: this rank's call.
        value: this rank's value.
        agreed: further values that must be equal on all ranks, of types that `digest` takes.

    Raises:
        CollectiveError: ranks differ in the call or `agreed`.
    """
    if group.size == 1:
        return [value]
    payload = _pickled(value)
    lengths, table = _exchange_bytes(group, call, _digest_of(call, *agreed), payload)
    if max(lengths) > table.shape[1]:
        padded = torch.cat([payload, payload.new_empty(max(lengths) - len(payload))])
        table = group.all_gather(padded).view(group.size, -1)
    return [_unpickled(row[:length]) for row, length in zip(table, lengths, strict=True)]


def _exchange_bytes(group: Collectives, call: Call, agreed: int, payload: Tensor) -> tuple[list[int], Tensor]:
    return _exchange(group, call, agreed, len(payload), lambda into: into.copy_(payload))


def _exchange(
    group: Collectives, call: Call, agreed: int, length: int, write: Callable[[Tensor], object]
) -> tuple[list[int], Tensor]:
    """Compare `agreed`, and exchange the payloads that fit into a header.

    Returns the payloads' lengths by rank, and (ranks, room) bytes. Rows of longer payloads are undefined.

    Args:
        group: a group for CPU tensors.
        call: this rank's call, for errors.
        agreed: a digest that must be equal on all ranks.
        length: length of this rank's payload in bytes.
        write: writes this rank's payload into (length,) bytes.
    """
    room = min(INLINE_BYTES, TABLE_BYTES // group.size) // ALIGNMENT * ALIGNMENT
    header = torch.empty(_HEAD.size + room, dtype=torch.uint8, device=_CPU)
    _HEAD.pack_into(header.numpy().data, 0, agreed, length)
    if length <= room:
        write(header.narrow(0, _HEAD.size, length))
    received = group.all_gather(header)
    words, step = received.numpy().data, len(header)
    heads = [_HEAD.unpack_from(words, rank * step) for rank in range(group.size)]
    if any(other != agreed for other, _ in heads):
        raise _disagreement(group, call)
    return [other for _, other in heads], received.view(group.size, -1).narrow(1, _HEAD.size, room)


def _disagreement(group: Collectives, call: Call) -> CollectiveError:
    """Return the error that shows where ranks differ.

    Collective: the difference is visible to all ranks, so all of them call this function.
    """
    of_ranks = group.all_gather_object((call.name, call.at, call.inputs()))
    operation, inputs = of_ranks[0][0], [each for _, _, each in of_ranks]
    names = [name + at for name, at, _ in of_ranks]
    if len(set(names)) > 1:
        finding, remedy = "ranks make different calls", ""
        found = [_in_words(name, each) for name, each in zip(names, inputs, strict=True)]
    else:
        finding = "ranks passed different inputs"
        remedy = ", with equal inputs in one order; pad_across_processes makes shapes equal"
        places = dict.fromkeys(place for each in inputs for place in each)
        different = [place for place in places if len({each.get(place) for each in inputs}) > 1]
        found = [_in_words(names[0], each, different or list(each)) for each in inputs]
    listed = "".join(f"  rank {rank}: {text}\n" for rank, text in enumerate(found))
    message = f"{operation}: {finding}\n{listed}call it on all ranks alike{remedy}"
    return CollectiveError(message, operation=operation, found=found)


def _in_words(name: str, inputs: Mapping[str, Description], places: Sequence[str] = ()) -> str:
    """Describe a call with at most `SHOWN` of its inputs at `places`, by default the places of tensors."""
    if list(inputs.values()) == [Description("NoneType")]:
        return name
    places = places or [place for place, each in inputs.items() if each.is_tensor] or list(inputs)
    shown = [f"{place} {inputs[place].text}".strip() for place in places if place in inputs]
    more = f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f"{name} of {'; '.join(shown[:SHOWN]) or 'nothing there'}{more}"


def _digest_of(call: Call, *agreed: Any) -> int:
    return digest(call.name, call.at, *agreed)


def _pickled(value: Any) -> Tensor:
    from accel_core.storage.tensor_bytes import pickled  # late: slow to import

    return torch.frombuffer(bytearray(pickled(value)), dtype=torch.uint8)


def _unpickled(payload: Tensor) -> Any:
    return pickle.loads(payload.contiguous().numpy().tobytes())  # noqa: S301 - sent by ranks of this run
