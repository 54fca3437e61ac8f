"""Leaves: the tensors of a state as this rank holds them, and what it tells other ranks of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import torch
from attrs import define
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_core.errors import CheckpointError

Json = Any
"""A value that the checkpoint's tagged JSON can hold (docs/checkpoint-format.md)."""

PLAIN_TYPES: Final = frozenset({Tensor, torch.nn.Parameter})
"""Types of tensors that wrap no others."""

Kind = Literal["like_param", "scalar", "factored", "opaque"]


@define(kw_only=True, eq=False)
class Leaf:
    """One tensor of the global state, as far as this rank holds it.

    Nothing changes one; a frozen one takes twice the time to make, and there are as many as tensors.

    kind: `like_param` has the shape of the parameter it belongs to (the parameter itself too);
        `scalar` is 0-dim; `factored` has a shape of its own; `opaque` only means something to the
        plugin with the same `layout`.
    shards: (offset, tensor) boxes of this rank, possibly none. A tensor is a **view of the live
        storage**: loading copies into it. Box shape and dtype are the tensor's.
    replicated: other ranks may hold the same box; core picks who writes.
    """

    kind: Kind
    global_shape: tuple[int, ...]
    shards: tuple[tuple[tuple[int, ...], Tensor], ...]
    replicated: bool = False
    layout: str | None = None


def full_leaf(
    tensor: Tensor, *, kind: Kind = "like_param", replicated: bool = True, layout: str | None = None
) -> Leaf:
    """Return the leaf of a tensor that this rank holds entirely."""
    shape, data = tuple(tensor.shape), tensor.detach() if tensor.requires_grad else tensor
    shards = (((0,) * len(shape), data),)
    return Leaf(kind=kind, global_shape=shape, shards=shards, replicated=replicated, layout=layout)


def leaf_of(tensor: Tensor, *, kind: Kind = "like_param", layout: str | None = None) -> Leaf:
    """Return a tensor's leaf: this rank's part of a DTensor, others whole."""
    if not hasattr(tensor, "device_mesh"):
        return full_leaf(tensor, kind=kind, layout=layout)
    from torch.distributed import get_world_size

    dtensor: Any = tensor.detach()
    local = dtensor.to_local()
    mesh = dtensor.device_mesh
    held = dtensor.__create_chunk_list__() if mesh.get_coordinate() is not None else ()
    return Leaf(
        kind=kind,
        global_shape=tuple(dtensor.shape),
        shards=tuple((tuple(chunk.offsets), local) for chunk in held),
        # Ranks outside its mesh may hold the same: those along a dimension that knows nothing of it.
        replicated=any(placement.is_replicate() for placement in dtensor.placements)
        or mesh.size() < get_world_size(),
        layout=layout,
    )


def flat_range(
    data: Tensor,
    shape: Sequence[int],
    start: int,
    *,
    strides: Sequence[int] | None = None,
    kind: Kind = "like_param",
    replicated: bool = False,
) -> Leaf:
    """Return the leaf of an engine that holds a flattened tensor from `start` on.

    `data` is 1-dim, and the live storage. `strides`: of the tensor before it was flattened, where the engine
    flattened its memory; None where it flattened its elements, row by row. At most 2 * len(shape) - 1 boxes.
    All of a tensor without elements is one box.

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
    """Return a dense tensor's dimensions, from widest steps to narrowest."""
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
    """Return True if the tensor wraps others; a DTensor is this rank's part of one."""
    if type(tensor) in PLAIN_TYPES or not isinstance(tensor, Tensor):
        return False
    return bool(is_traceable_wrapper_subclass(tensor)) and not hasattr(tensor, "device_mesh")


def layout_of(tensor: Any) -> str:
    """Return the class, shape and context of a wrapper: wrappers that have them alike can exchange parts."""
    return f"{type(tensor).__qualname__} {list(tensor.shape)} {tensor.__tensor_flatten__()[1]!r}"


def parts_of(tensor: Any) -> Iterator[tuple[str, Tensor, str]]:
    """Yield (name, tensor, layout of its wrapper) of each part; of a wrapper inside, its own parts."""
    layout = layout_of(tensor)
    for key in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, key)
        if wraps(part):
            yield from ((f"{key}#{name}", inner, inside) for name, inner, inside in parts_of(part))
        else:
            yield key, part, layout


# -- what ranks tell each other of leaves ----------------------------------------------------------------


Key = tuple[str, str]
"""Key of a leaf: (unit, `model/NAME` | `optimizer/NAME/KEY` | ...).

The run's own leaves have the unit "".
"""


class Box(NamedTuple):
    """A rectangular part of a leaf."""

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
    """A rank's description of a leaf for the others: everything but the data."""

    kind: str
    shape: tuple[int, ...]
    layout: str | None
    replicated: bool
    any_replica_may_write: bool
    """True if replicas are equal, so that any rank may write the leaf.

    Otherwise the lowest rank that holds a replica writes it.
    """
    dtypes: tuple[torch.dtype, ...]
    boxes: tuple[Box, ...]


def declare(leaf: Leaf, *, any_replica_may_write: bool) -> Declared:
    """Return the declaration of a leaf: one object for equal ones.

    Leaves are many, their shapes are few.
    """
    # A list first: this runs for every leaf of every save, and a generator takes twice the time.
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
