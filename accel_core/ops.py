"""Collectives over nested structures: as few as there are dtypes, and checked before they start.

On CPU groups each operation begins with one exchange of fixed size: a digest of operation, structure,
shapes and dtypes, in which a small payload travels along. Ranks that disagree all raise, with what
each one brought; small operations are over after that one exchange. On other devices the exchange is
made in debug mode only (ACCEL_DEBUG=1 or ACCELERATE_DEBUG_MODE=1).

All ranks must call. Results carry no gradient, and lie on the run's device. A world of one never
communicates, but gets results of the same shapes.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from accel_core.errors import CollectiveError
from accel_core.nested import (
    concatenate,
    describe,
    find_batch_size,
    is_torch_tensor,
    leaves,
    rebuild,
    recursively_apply,
    send_to_device,
    slice_tensors,
)

if TYPE_CHECKING:
    from accel_core.run import Run
    from accel_core.world import Collectives

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "find_batch_size",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "is_torch_tensor",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "split_between_processes",
]

Reduction = Literal["sum", "mean", "min", "max", "none"]

INLINE_BYTES: Final = 16384
TABLE_BYTES: Final = 65536
"""Payload that travels with the digest, of a rank and of all: less than what a second latency costs."""
SHOWN: Final = 4
"""Places shown of a disagreement."""
_HEAD_BYTES: Final = 16
_split_copy: Final[Any] = torch.split_with_sizes_copy
"""Contiguous pieces in one call. Its stub forgets that it returns them."""
_ALIGNMENT: Final = 16


def gather(tensor: Any, *, run: Run | None = None) -> Any:
    """Each tensor (n, ...) of every reader, concatenated in reader order: (readers * n, ...).

    A 0-dim tensor counts as (1,). Shapes must be equal on all ranks; `pad_across_processes` makes
    them so.

    Raises:
        CollectiveError: structures, shapes or dtypes differ between ranks; it shows each rank's.
        TypeError: a leaf is no tensor.
    """
    run = _run(run)
    tensors, structure = leaves(tensor, "gather")
    rows = [_row(each) for each in tensors]
    collectives = run.collectives(run.topology.gather_dim)
    if collectives.size == 1:
        return rebuild(tensor, rows)
    packed = _Packed([each.to(run.device) for each in rows])
    signature = packed.signature("gather", structure)
    payloads = _exchange(run, collectives, signature, packed.payload(), tensor)
    table = torch.stack(payloads) if isinstance(payloads, list) else payloads
    return rebuild(tensor, packed.unpack_rows(table))


def gather_object(object: Any, *, run: Run | None = None) -> Any:
    """Every reader's picklable objects, in reader order.

    Lists (and tuples) are concatenated, mappings of them key by key; anything else becomes a list.
    """
    run = _run(run)
    dim = run.topology.gather_dim
    collectives = run.collectives("control" if dim == "world" else dim)
    return _join_objects(_all_objects(run, collectives, object, "gather_object"))


def gather_for_metrics(input_data: Any, use_gather_object: bool = False, *, run: Run | None = None) -> Any:
    """Gather what a batch gave (predictions, labels, ...), without the samples that pad its round.

    What holds something else than tensors, or is asked to, is gathered as objects: a list of a
    sample's object each. The padding is that of the innermost loader being iterated.

    Raises:
        CollectiveError: as `gather`.
    """
    run = _run(run)
    as_objects = use_gather_object or not _all_tensors(input_data)
    gathered = gather_object(input_data, run=run) if as_objects else gather(input_data, run=run)
    remainder = run.active_loaders[-1].remainder if run.active_loaders else -1
    if remainder < 0:
        return gathered
    if as_objects:
        return _cut_objects(gathered, remainder)
    return slice_tensors(gathered, slice(remainder))


def broadcast(tensor: Any, from_process: int = 0, *, run: Run | None = None) -> Any:
    """Overwrite each tensor, in place, with that of rank `from_process`. Returns the structure.

    Raises:
        CollectiveError: structures, shapes or dtypes differ between ranks; it shows each rank's.
    """
    run = _run(run)
    collectives = run.collectives("world")
    tensors, structure = leaves(tensor, "broadcast")
    if collectives.size == 1:
        return tensor
    packed = _Packed([each.detach().to(run.device) for each in tensors])
    signature = packed.signature(f"broadcast from {from_process}", structure)

    def send(payload: Tensor) -> Tensor:
        return collectives.broadcast(payload, from_process)

    received = _exchange(run, collectives, signature, packed.payload(), tensor, transfer=send)
    payload = received[from_process] if isinstance(received, list) else received
    with torch.no_grad():
        for mine, theirs in zip(tensors, packed.unpack(payload), strict=True):
            mine.copy_(theirs)
    return tensor


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, run: Run | None = None
) -> list[Any]:
    """Replace the list's items, in place, by those of rank `from_process`. Returns the list."""
    run = _run(run)
    control = run.collectives("control")
    if control.size > 1:
        object_list[:] = control.broadcast_object(object_list, from_process)
    return object_list


def reduce(tensor: Any, reduction: Reduction = "mean", scale: float = 1.0, *, run: Run | None = None) -> Any:
    """Each tensor reduced over the ranks that share a loss, times `scale`. Shapes must be equal.

    `sum`, `mean`, `min`, `max`, or `none`. Booleans are counted by `sum`; 8-bit floats are reduced in
    float32 and rounded once.

    Raises:
        CollectiveError: structures, shapes or dtypes differ between ranks; it shows each rank's.
        TypeError: `mean` of integers.
    """
    run = _run(run)
    if reduction == "none":
        return tensor
    tensors, structure = leaves(tensor, "reduce")
    wired = [_wire(each.detach(), reduction) for each in tensors]
    collectives = run.collectives(run.topology.loss_dim)
    if collectives.size > 1:
        packed = _Packed([each.to(run.device) for each in wired])
        wired = _reduced(
            run, collectives, packed, packed.signature(f"reduce ({reduction})", structure), reduction, tensor
        )
    results = [_unwire(each, of, reduction) for each, of in zip(wired, tensors, strict=True)]
    return rebuild(tensor, results if scale == 1.0 else [each * scale for each in results])


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False, *, run: Run | None = None
) -> Any:
    """Each tensor padded along `dim` with `pad_index` to the longest of all readers.

    pad_first: pad at the start. Tensors without that dimension stay as they are.
    """
    run = _run(run)
    collectives = run.collectives(run.topology.gather_dim)
    if collectives.size == 1:
        return tensor
    tensors, structure = leaves(tensor, "pad_across_processes")
    here = [each.shape[dim] if -each.ndim <= dim < each.ndim else -1 for each in tensors]
    every = _all_objects(run, collectives, (structure, here), "pad_across_processes")
    if any(other != structure for other, _ in every):
        raise _disagreement(collectives, "pad_across_processes", tensor)
    longest = [max(lengths) for lengths in zip(*(lengths for _, lengths in every), strict=True)]
    padded = [
        _pad(each, dim, length, pad_index, pad_first) if length > mine else each
        for each, mine, length in zip(tensors, here, longest, strict=True)
    ]
    return rebuild(tensor, padded)


@contextmanager
def split_between_processes(
    inputs: Any, apply_padding: bool = False, *, run: Run | None = None
) -> Iterator[Any]:
    """This reader's contiguous part of a list, tuple, tensor or dict of them; the first get one more.

    apply_padding: repeat the last item so that all readers have equally many.

    Raises:
        ValueError: the values of a dict differ in length.
    """
    topology = _run(run).topology
    if topology.readers == 1:
        yield inputs
        return
    if isinstance(inputs, dict) and len({len(value) for value in inputs.values()}) > 1:
        raise ValueError("split_between_processes: all values of the dict must have the same length")
    length = len(next(iter(inputs.values()), ())) if isinstance(inputs, dict) else len(inputs)
    share, extra = divmod(length, topology.readers)
    start = topology.reader * share + min(topology.reader, extra)
    stop = start + share + (topology.reader < extra)
    missing = share + (extra > 0) - (stop - start) if apply_padding and length else 0
    yield _part(inputs, start, stop, missing)


# -- packing: all tensors of an operation as one run of bytes --------------------------------------


class _Packed:
    """Tensors as one flat tensor a dtype, and those as one of bytes; in an order all ranks share."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.groups: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(tensors):
            self.groups.setdefault(tensor.dtype, []).append(number)
        self.flat = [
            torch.cat([tensors[number].reshape(-1) for number in numbers]) for numbers in self.groups.values()
        ]

    def payload(self) -> Tensor:
        """(b,) uint8: the groups one after the other, each where any dtype can be viewed."""
        if not self.flat:
            return torch.empty(0, dtype=torch.uint8)
        pieces: list[Tensor] = []
        for flat in self.flat:
            raw = flat.view(torch.uint8)
            pieces.append(raw)
            if len(raw) % _ALIGNMENT:
                pieces.append(raw.new_zeros(_ALIGNMENT - len(raw) % _ALIGNMENT))
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def signature(self, operation: str, structure: list[Any]) -> tuple[str, bytes]:
        """(operation, what must be equal on all ranks)."""
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        dtypes = [str(tensor.dtype) for tensor in self.tensors]
        return operation, marshal.dumps((operation, structure, shapes, dtypes), 2)  # 2: without references

    def split_bytes(self, payload: Tensor) -> list[Tensor]:
        """(..., b) bytes -> the groups, each (..., elements) of its dtype."""
        groups, start = [], 0
        for flat in self.flat:
            size = flat.numel() * flat.element_size()
            groups.append(payload[..., start : start + size].view(flat.dtype))
            start += size + -size % _ALIGNMENT
        return groups

    def unpack(self, payload: Tensor) -> list[Tensor]:
        """One rank's bytes -> its tensors."""
        return self.unflatten(self.split_bytes(payload))

    def unflatten(self, groups: Sequence[Tensor]) -> list[Tensor]:
        """The groups, one flat tensor a dtype -> tensors of the original shapes."""
        found: dict[int, Tensor] = {}
        for group, numbers in zip(groups, self.groups.values(), strict=True):
            pieces = group.split([self.tensors[number].numel() for number in numbers])
            for number, piece in zip(numbers, pieces, strict=True):
                found[number] = piece.view(self.tensors[number].shape)
        return [found[number] for number in range(len(self.tensors))]

    def unpack_rows(self, table: Tensor) -> list[Tensor]:
        """(ranks, b) bytes of every rank -> tensors (ranks * n, ...)."""
        found: dict[int, Tensor] = {}
        ranks = table.shape[0]
        for group, numbers in zip(self.split_bytes(table), self.groups.values(), strict=True):
            sizes = [self.tensors[number].numel() for number in numbers]
            pieces = _split_copy(group, sizes, dim=1)
            for number, piece in zip(numbers, pieces, strict=True):
                first, *rest = self.tensors[number].shape
                found[number] = piece.view(ranks * first, *rest)
        return [found[number] for number in range(len(self.tensors))]


# -- the exchange ----------------------------------------------------------------------------------


def _exchange(
    run: Run,
    collectives: Collectives,
    signature: tuple[str, bytes],
    payload: Tensor,
    tree: Any,
    transfer: Callable[[Tensor], Tensor] | None = None,
) -> Tensor | list[Tensor]:
    """Check that ranks agree, and move `payload` (b,), of equal length on all ranks.

    Small ones have travelled with the check: then a list, by rank. Else what `transfer` gives; without
    it, (ranks, b) of all ranks.
    """
    operation, agreed = signature
    if run.device.type == "cpu":
        digest = int.from_bytes(hashlib.blake2b(agreed, digest_size=8).digest(), "little", signed=True)
        heads, inline = _meet(collectives, digest, payload)
        if any(other != digest for other, _ in heads):
            raise _disagreement(collectives, operation, tree)
        if inline is not None:
            return inline
    elif _debugging() and any(other != agreed for other in collectives.all_gather_object(agreed)):
        raise _disagreement(collectives, operation, tree)
    if not len(payload):
        return [payload] * collectives.size
    if transfer is not None:
        return transfer(payload)
    return collectives.all_gather(payload).view(collectives.size, -1)


def _meet(
    collectives: Collectives, digest: int, payload: Tensor
) -> tuple[list[tuple[int, int]], list[Tensor] | None]:
    """One exchange of fixed size: ((digest, payload bytes) by rank, the payloads if all fitted in)."""
    room = min(INLINE_BYTES, TABLE_BYTES // collectives.size) // _ALIGNMENT * _ALIGNMENT
    head = torch.zeros(_HEAD_BYTES + room, dtype=torch.uint8)
    head[:_HEAD_BYTES].view(torch.int64).copy_(torch.tensor([digest, len(payload)]))
    if len(payload) <= room:
        head[_HEAD_BYTES : _HEAD_BYTES + len(payload)] = payload
    table = collectives.all_gather(head).view(collectives.size, -1)
    heads = [(int(d), int(n)) for d, n in table[:, :_HEAD_BYTES].contiguous().view(torch.int64).tolist()]
    if any(length > room for _, length in heads):
        return heads, None
    return heads, [row[_HEAD_BYTES : _HEAD_BYTES + n] for row, (_, n) in zip(table, heads, strict=True)]


def _all_objects(run: Run, collectives: Collectives, value: Any, operation: str) -> Sequence[Any]:
    """Every rank's picklable value, in rank order; small ones in one exchange."""
    if collectives.size == 1:
        return [value]
    if run.device.type != "cpu":
        return collectives.all_gather_object(value)
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    digest = int.from_bytes(
        hashlib.blake2b(operation.encode(), digest_size=8).digest(), "little", signed=True
    )
    heads, inline = _meet(collectives, digest, payload)
    if any(other != digest for other, _ in heads):
        raise _disagreement(collectives, operation, "objects")
    if inline is None:
        longest = max(length for _, length in heads)
        padded = torch.cat([payload, payload.new_zeros(longest - len(payload))])
        table = collectives.all_gather(padded).view(collectives.size, -1)
        inline = [row[:length] for row, (_, length) in zip(table, heads, strict=True)]
    return [pickle.loads(bytes(row.tolist())) for row in inline]  # noqa: S301 - of our own ranks


def _disagreement(collectives: Collectives, operation: str, tree: Any) -> CollectiveError:
    """Says where the ranks differ. They all know that they do, and so all come here."""
    every = collectives.all_gather_object((operation, describe(tree)))
    places = dict.fromkeys(place for _, found in every for place in found)
    different = [place for place in places if len({found.get(place) for _, found in every}) > 1] or list(
        places
    )
    texts = []
    for called, found in every:
        shown = [f"{place} {found[place]}".strip() for place in different[:SHOWN] if place in found]
        texts.append(f"{called} of {'; '.join(shown) or 'nothing there'}")
    more = f"\n  and {len(different) - SHOWN} more places" if len(different) > SHOWN else ""
    return CollectiveError(
        f"{operation}: the ranks did not bring the same\n"
        + "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        + f"{more}\ncall it on all ranks alike; pad_across_processes makes shapes equal, gather_object needs"
        " none equal",
        operation=operation,
        found=texts,
    )


def _debugging() -> bool:
    return any(os.environ.get(name) == "1" for name in ("ACCEL_DEBUG", "ACCELERATE_DEBUG_MODE"))


# -- pieces ----------------------------------------------------------------------------------------


def _run(run: Run | None) -> Run:
    if run is not None:
        return run
    from accel_core.run import current

    return current()


def _row(tensor: Tensor) -> Tensor:
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if tensor.ndim else tensor.reshape(1)


def _all_tensors(data: Any) -> bool:
    try:
        leaves(data, "gather")
    except TypeError:
        return False
    return True


def _reduced(
    run: Run,
    collectives: Collectives,
    packed: _Packed,
    signature: tuple[str, bytes],
    reduction: str,
    tree: Any,
) -> list[Tensor]:
    operation = "sum" if reduction == "mean" else reduction

    def transfer(_: Tensor) -> Tensor:
        for flat in packed.flat:
            collectives.all_reduce(flat, operation)
        return packed.payload()

    received = _exchange(run, collectives, signature, packed.payload(), tree, transfer=transfer)
    if isinstance(received, list):
        together = zip(*map(packed.split_bytes, received), strict=True)
        groups = [_fold(torch.stack(ranks), operation) for ranks in together]
    else:
        groups = packed.split_bytes(received)
    if reduction == "mean":
        groups = [group / collectives.size for group in groups]
    return packed.unflatten(groups)


def _fold(ranks: Tensor, operation: str) -> Tensor:
    if operation == "sum":
        return ranks.sum(0, dtype=ranks.dtype)
    return ranks.amin(0) if operation == "min" else ranks.amax(0)


def _wire(tensor: Tensor, reduction: Reduction) -> Tensor:
    """In a dtype that can be reduced."""
    if tensor.dtype is torch.bool:
        tensor = tensor.to(torch.int64 if reduction in ("sum", "mean") else torch.uint8)
    if reduction == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(
            f"reduce: the mean of {tensor.dtype} need not be a whole number\n"
            "use reduction='sum', or convert with .float()"
        )
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _unwire(reduced: Tensor, original: Tensor, reduction: Reduction) -> Tensor:
    counted = original.dtype is torch.bool and reduction == "sum"
    return reduced if counted else reduced.to(original.dtype)


def _pad(tensor: Tensor, dim: int, length: int, value: Any, first: bool) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = length
    padded = tensor.new_empty(shape)
    padded[...] = value
    start = length - tensor.shape[dim] if first else 0
    padded.narrow(dim, start, tensor.shape[dim]).copy_(tensor.detach())
    return padded


def _part(value: Any, start: int, stop: int, missing: int) -> Any:
    if isinstance(value, dict):
        return {key: _part(item, start, stop, missing) for key, item in value.items()}
    if hasattr(value, "select") and not isinstance(value, Tensor):  # tables, which are not sliced
        return value.select([*range(start, stop), *[len(value) - 1] * missing])
    if not isinstance(value, list | tuple | Tensor):
        return value
    part = value[start:stop]
    if missing and isinstance(value, Tensor):
        return torch.cat([part, value[-1:].expand(missing, *value.shape[1:])])  # type: ignore[list-item]
    return part + type(value)([value[-1]]) * missing if missing else part  # type: ignore[operator]


def _join_objects(every: Sequence[Any]) -> Any:
    first = every[0]
    if isinstance(first, dict):
        return {key: _join_objects([each[key] for each in every]) for key in first}
    if isinstance(first, list | tuple):
        return [item for each in every for item in each]
    return list(every)


def _cut_objects(gathered: Any, length: int) -> Any:
    if isinstance(gathered, dict):
        return {key: _cut_objects(value, length) for key, value in gathered.items()}
    return gathered[:length]
