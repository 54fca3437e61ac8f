"""The state model: what a plugin hands over to be saved, in a form any other stack can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Entry", "Json", "Leaf", "OptimizerState", "TensorTemplate", "whole"]

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


def whole(tensor: Tensor, *, kind: Kind = "like_param", replicated: bool = True) -> Leaf:
    """The leaf of a tensor that this rank holds entirely."""
    data = tensor.detach()
    shape = tuple(data.shape)
    return Leaf(kind=kind, global_shape=shape, shards=(((0,) * len(shape), data),), replicated=replicated)


@frozen(kw_only=True)
class OptimizerState:
    """An optimizer by parameter name.

    leaves: `NAME/KEY` -> leaf, for the tensors of its per-parameter state.
    plain: parameter name -> key -> what is no tensor (SparseAdam's int step, ...).
    groups: the parameter groups: hyperparameters, and under `params` the parameters' names.
    """

    leaves: Mapping[str, Leaf]
    plain: Mapping[str, Mapping[str, Json]] = field(factory=dict)
    groups: Sequence[Mapping[str, Json]]


@frozen
class TensorTemplate:
    """A tensor to allocate before loading: what a checkpoint says of it."""

    kind: Kind
    global_shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: float32, bfloat16, ..."""


@frozen(kw_only=True)
class Entry:
    """What a plugin itself must remember, one value of `save_state`.

    scope: `replicated` (the same on all ranks), `per_reader` or `per_rank` (meaningless at another
        number of readers or ranks, unless the plugin reassigns it).
    """

    value: Leaf | Json
    scope: Literal["replicated", "per_reader", "per_rank"] = "replicated"
