"""The state model: state that a plugin returns, in a form that any stack can read."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

from attrs import field, frozen

from accel_core.storage.leaves import Json, Kind, Leaf, flat_range, full_leaf, leaf_of

__all__ = [
    "Entry",
    "Json",
    "Kind",
    "Leaf",
    "LeavesOnUse",
    "OptimizerState",
    "TensorTemplate",
    "flat_range",
    "full_leaf",
    "leaf_of",
]


class LeavesOnUse(Mapping[str, Leaf]):
    """Leaves that are created when the mapping is first read.

    A load asks for an optimizer's leaves before and after it allocates state. For checkpoints in local files
    it never reads the first mapping.
    """

    def __init__(self, make: Callable[[], dict[str, Leaf]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> dict[str, Leaf]:
        return self._make()

    def __getitem__(self, key: str) -> Leaf:
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def items(self) -> ItemsView[str, Leaf]:
        """Return the items of a dict, which iterate faster than a mapping's."""
        return self._made.items()


@frozen(kw_only=True)
class OptimizerState:
    """An optimizer's state by parameter name.

    Attributes:
        leaves: `NAME/KEY` -> leaf, for the tensors of its per-parameter state.
        plain: parameter name -> key -> a value that is not a tensor (SparseAdam's int step, ...).
        groups: for each of the optimizer's `param_groups`, in order: the hyperparameters that mean something
            in any stack, and under `params` the parameters' names. Ranks may have different groups.
        algorithm: name of torch's class for the same algorithm; None: the optimizer's own class. A load
            resumes only from state of the same algorithm.
    """

    leaves: Mapping[str, Leaf]
    plain: Mapping[str, Mapping[str, Json]] = field(factory=dict)
    groups: Sequence[Mapping[str, Json]]
    algorithm: str | None = None


@frozen
class TensorTemplate:
    """A tensor to allocate before loading, as the checkpoint describes it."""

    kind: Kind
    global_shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: float32, bfloat16, ..."""
    layout: str | None = None
    number: Callable[[], float] = field(default=lambda: 0.0, eq=False, repr=False)
    """Reads the value of a `scalar`."""


@frozen(kw_only=True)
class Entry:
    """A value that a plugin returns from `save_state`: state that the plugin itself must remember.

    Attributes:
        value: a tensor's leaf, or a JSON value.
        scope: `replicated` (the same on all ranks that have an entry of this name: pipeline stages may have
            different entries), `per_reader` or `per_rank` (meaningless at another number of readers or ranks,
            unless the plugin reassigns it).
    """

    value: Leaf | Json
    scope: Literal["replicated", "per_reader", "per_rank"] = "replicated"
