"""The state model: what a plugin hands over to be saved, in a form any other stack can read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Entry", "Json", "Leaf", "OptimizerState", "TensorTemplate", "flat_range", "leaf_of", "whole"]

Json = Any
"""What the checkpoint's tagged JSON can hold (docs/checkpoint-format.md)."""

Kind = Literal["like_param", "scalar", "factored", "opaque"]


@frozen(kw_only=True, eq=False)
class Leaf:
    """One tensor of the global state, as far as this rank holds it.

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


def whole(
    tensor: Tensor, *, kind: Kind = "like_param", replicated: bool = True, layout: str | None = None
) -> Leaf:
    """The leaf of a tensor that this rank holds entirely."""
    data = tensor.detach()
    shape = tuple(data.shape)
    shards = (((0,) * len(shape), data),)
    return Leaf(kind=kind, global_shape=shape, shards=shards, replicated=replicated, layout=layout)


def leaf_of(tensor: Tensor, *, kind: Kind = "like_param", layout: str | None = None) -> Leaf:
    """The leaf of a tensor as torch holds it: a DTensor by this rank's part of it, any other whole."""
    if not hasattr(tensor, "device_mesh"):
        return whole(tensor, kind=kind, layout=layout)
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
    data: Tensor, shape: Sequence[int], start: int, *, kind: Kind = "like_param", replicated: bool = False
) -> Leaf:
    """The leaf of an engine that holds elements `start`, `start + 1`, ... of a flattened tensor of `shape`.

    `data` is 1-dim, and the live storage. At most 2 * len(shape) - 1 boxes.
    """
    sizes, dims = tuple(shape) or (1,), len(shape)
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    shards, at, end = [], start, start + data.numel()
    while at < end:
        dim = next(dim for dim, stride in enumerate(strides) if at % stride == 0 and at + stride <= end)
        offset = tuple(at // stride % size for stride, size in zip(strides, sizes, strict=True))
        rows = min((end - at) // strides[dim], sizes[dim] - offset[dim])
        box = (*(1,) * dim, rows, *sizes[dim + 1 :])[:dims]
        elements = data.detach()[at - start :][: rows * strides[dim]]
        shards.append((offset[:dims], elements.view(box)))
        at += rows * strides[dim]
    return Leaf(kind=kind, global_shape=tuple(shape), shards=tuple(shards), replicated=replicated)


@frozen(kw_only=True)
class OptimizerState:
    """An optimizer by parameter name.

    leaves: `NAME/KEY` -> leaf, for the tensors of its per-parameter state.
    plain: parameter name -> key -> what is no tensor (SparseAdam's int step, ...).
    groups: for each of the optimizer's `param_groups`, in order: the hyperparameters that mean
        something in any stack, and under `params` the parameters' names. Ranks may have different ones.
    algorithm: name of the class in torch that does the same; None: the optimizer's own class. Only
        state of one algorithm is resumed from.
    """

    leaves: Mapping[str, Leaf]
    plain: Mapping[str, Mapping[str, Json]] = field(factory=dict)
    groups: Sequence[Mapping[str, Json]]
    algorithm: str | None = None


@frozen
class TensorTemplate:
    """A tensor to allocate before loading: what a checkpoint says of it."""

    kind: Kind
    global_shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: float32, bfloat16, ..."""
    layout: str | None = None


@frozen(kw_only=True)
class Entry:
    """What a plugin itself must remember, one value of `save_state`.

    scope: `replicated` (the same on all ranks), `per_reader` or `per_rank` (meaningless at another
        number of readers or ranks, unless the plugin reassigns it).
    """

    value: Leaf | Json
    scope: Literal["replicated", "per_reader", "per_rank"] = "replicated"
