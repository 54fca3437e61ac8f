"""Leaves: the tensors of a state as this rank holds them, and their descriptions for other ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, Final, Literal, NamedTuple

import torch
from attrs import define
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_core.errors import CheckpointError

Json = Any
"""A value that the checkpoint's tagged JSON can represent (docs/checkpoint-format.md)."""

PLAIN_TYPES: Final = frozenset({Tensor, torch.nn.Parameter})
"""Tensor types that are not wrapper subclasses."""

Kind = Literal["like_param", "scalar", "factored", "opaque"]


@define(kw_only=True, eq=False)
class Leaf:
    """One tensor of the global state, with the parts that this rank holds.

    Treat as immutable. Not frozen: frozen attrs classes take twice as long to make, and every tensor has one.
    """

    kind: Kind
    """The shape and meaning of the tensor.

    `like_param` tensors have the shape of their parameter (so do parameters themselves), `scalar` tensors are
    0-dim, `factored` tensors have a shape of their own, and `opaque` tensors have a meaning only for the
    plugin with the same `layout`.
    """
    global_shape: tuple[int, ...]
    shards: tuple[tuple[tuple[int, ...], Tensor], ...]
    """(offset, tensor) of each box that this rank holds, possibly none.

    A tensor is a **view of the live storage**: loading copies into it. The box has its shape and dtype.
    """
    replicated: bool = False
    """True if other ranks may hold the same box; core picks the rank that writes it."""
    layout: str | None = None
    """Format of the tensor, if it is part of a wrapper or `opaque`: loading requires the same text."""


def full_leaf(
    tensor: Tensor, *, kind: Kind = "like_param", replicated: bool = True, layout: str | None = None
) -> Leaf:
    """Return the leaf of a tensor that this rank holds in full."""
    shape, data = tuple(tensor.shape), tensor.detach() if tensor.requires_grad else tensor
    shards = (((0,) * len(shape), data),)
    return Leaf(kind=kind, global_shape=shape, shards=shards, replicated=replicated, layout=layout)


def leaf_of(tensor: Tensor, *, kind: Kind = "like_param", layout: str | None = None) -> Leaf:
    """Return the leaf of a tensor: this rank's shard of a DTensor, or the full tensor."""
    if not hasattr(tensor, "device_mesh"):
        return full_leaf(tensor, kind=kind, layout=layout)
    from torch.distributed import get_world_size

    dtensor: Any = tensor.detach()
    local = dtensor.to_local()
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    held = () if coordinate is None else _shards(dtensor, local, coordinate)
    return Leaf(
        kind=kind,
        global_shape=tuple(dtensor.shape),
        shards=tuple(held),
        # A mesh smaller than the world: ranks along other mesh dims may hold the same shard.
        replicated=any(placement.is_replicate() for placement in dtensor.placements)
        or mesh.size() < get_world_size(),
        layout=layout,
    )


def _shards(
    dtensor: Any, local: Tensor, coordinate: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield (offset, tensor) of each box of a DTensor's local tensor.

    Torch describes one box only. Packed projections (gate and up in one weight) are split by a placement that
    deals out parts in turns, so that a rank holds a part of each.
    """
    if not any(hasattr(placement, "split_factor") for placement in dtensor.placements):
        yield from ((tuple(chunk.offsets), local) for chunk in dtensor.__create_chunk_list__())
        return
    runs = []
    for dim, size in enumerate(dtensor.shape):
        kept = [(0, size)]
        for placement, at, ranks in zip(
            dtensor.placements, coordinate, dtensor.device_mesh.shape, strict=True
        ):
            if getattr(placement, "dim", None) == dim:
                kept = _dealt(kept, at, ranks, getattr(placement, "split_factor", 1))
        runs.append(kept)
    for box in product(*runs):
        part, offset = local, []
        for dim, (start, length) in enumerate(box):
            before = sum(length for begin, length in runs[dim] if begin < start)
            part = part.narrow(dim, before, length)
            offset.append(start)
        yield tuple(offset), part


def _dealt(runs: Sequence[tuple[int, int]], at: int, ranks: int, turns: int) -> list[tuple[int, int]]:
    """Return the (start, length) that one of the ranks gets if the runs are cut as by `torch.chunk`.

    The pieces are dealt out to the ranks in turns.
    """
    piece = -(-sum(length for _, length in runs) // (ranks * turns))
    kept: list[tuple[int, int]] = []
    for turn in range(turns):
        first, position = (turn * ranks + at) * piece, 0
        for start, length in runs:
            begin = start + max(first - position, 0)
            end = start + min(first + piece - position, length)
            position += length
            if begin < end and kept and sum(kept[-1]) == begin:
                kept[-1] = (kept[-1][0], end - kept[-1][0])
            elif begin < end:
                kept.append((begin, end - begin))
    return kept or [(0, 0)]


def flat_range(
    data: Tensor,
    shape: Sequence[int],
    start: int,
    *,
    strides: Sequence[int] | None = None,
    kind: Kind = "like_param",
    replicated: bool = False,
) -> Leaf:
    """Return the leaf of a range of a flattened tensor, as engines with flat buffers hold it.

    The leaf has at most 2 * len(shape) - 1 boxes; a tensor without elements is one box.

    Args:
        data: the range as a 1-dim view of the live storage.
        shape: the shape of the tensor before it was flattened.
        start: the first element of the range in the flattened tensor.
        strides: the strides of the tensor if the engine flattened its memory; None if the engine flattened
            the elements in row-major order.
        kind: as in `Leaf`.
        replicated: as in `Leaf`.

    Raises:
        CheckpointError: a tensor of these strides has gaps, or elements that share memory.
    """
    order = _memory_order(shape, strides)
    sizes, dims = tuple(shape[dim] for dim in order) or (1,), len(shape)
    back = [order.index(dim) for dim in range(dims)]
    steps = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    shards, at, end = [], start, start + data.numel()
    if not math.prod(sizes):
        shards.append(((0,) * dims, data.detach()[:0].view(tuple(shape))))
    while at < end:
        dim = next(dim for dim, step in enumerate(steps) if at % step == 0 and at + step <= end)
        offset = [at // step % size for step, size in zip(steps, sizes, strict=True)]
        rows = min((end - at) // steps[dim], sizes[dim] - offset[dim])
        box = (*(1,) * dim, rows, *sizes[dim + 1 :])[:dims]
        elements = data.detach()[at - start :][: rows * steps[dim]]
        shards.append((tuple(offset[dim] for dim in back), elements.view(box).permute(back)))
        at += rows * steps[dim]
    return Leaf(kind=kind, global_shape=tuple(shape), shards=tuple(shards), replicated=replicated)


def _memory_order(shape: Sequence[int], strides: Sequence[int] | None) -> list[int]:
    """Return a dense tensor's dimensions, from the largest stride to the smallest."""
    if strides is None or not math.prod(shape):
        return [*range(len(shape))]
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    step = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != step:
            raise CheckpointError(
                f"a tensor of shape {list(shape)} and strides {list(strides)} has gaps, or elements that"
                " share memory, and its place in a flat vector is unknown\nmake the parameter contiguous()"
            )
        step *= shape[dim]
    return order


# -- tensors that wrap others, such as quantised ones: torch's traceable wrapper subclasses ---------------


def wraps(tensor: object) -> bool:
    """Return True if the object is a traceable wrapper subclass of Tensor other than DTensor."""
    if type(tensor) in PLAIN_TYPES or not isinstance(tensor, Tensor):
        return False
    return bool(is_traceable_wrapper_subclass(tensor)) and not hasattr(tensor, "device_mesh")


def layout_of(tensor: Any) -> str:
    """Return a wrapper's class, shape and context as text; wrappers with equal text can exchange parts."""
    return f"{type(tensor).__qualname__} {list(tensor.shape)} {tensor.__tensor_flatten__()[1]!r}"


def parts_of(tensor: Any) -> Iterator[tuple[str, Tensor, str]]:
    """Yield (name, tensor, layout of its wrapper) of each part; wrappers inside are taken apart too."""
    layout = layout_of(tensor)
    for key in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, key)
        if wraps(part):
            yield from ((f"{key}#{name}", inner, inside) for name, inner, inside in parts_of(part))
        else:
            yield key, part, layout


# -- descriptions of leaves, which ranks exchange --------------------------------------------------------


Key = tuple[str, str]
"""Key of a leaf: (unit, `model/NAME` | `optimizer/NAME/KEY` | ...). The run's own leaves have the unit ""."""


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.offset, self.shape, strict=False)))

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return (
            "["
            + ", ".join(f"{start}:{end}" for start, end in zip(self.offset, self.ends, strict=False))
            + "]"
        )


class Declared(NamedTuple):
    """A rank's description of a leaf for other ranks: everything except the data."""

    kind: str
    shape: tuple[int, ...]
    layout: str | None
    replicated: bool
    any_replica_may_write: bool
    """True if replicas are equal, so that any of their ranks may write; otherwise the lowest rank writes."""
    dtypes: tuple[torch.dtype, ...]
    boxes: tuple[Box, ...]


def declare(leaf: Leaf, *, any_replica_may_write: bool) -> Declared:
    """Return the declaration of a leaf. Equal declarations share one object: many leaves have few shapes."""
    # A list comprehension: this runs for every leaf of every save, and a generator takes twice the time.
    parts = tuple([(tuple(offset), tensor.shape, tensor.dtype) for offset, tensor in leaf.shards])
    return _declared(
        leaf.kind, tuple(leaf.global_shape), leaf.layout, leaf.replicated, any_replica_may_write, parts
    )


@lru_cache(maxsize=4096)
def _declared(
    kind: str,
    shape: tuple[int, ...],
    layout: str | None,
    replicated: bool,
    any_replica_may_write: bool,
    parts: Any,
) -> Declared:
    """Return the declaration whose parts are (offset, shape, dtype)."""
    dtypes = tuple(dtype for _, _, dtype in parts)
    boxes = tuple(Box(offset, tuple(size)) for offset, size, _ in parts)
    return Declared(kind, shape, layout, replicated, any_replica_may_write, dtypes, boxes)
