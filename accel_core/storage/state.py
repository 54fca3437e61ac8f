"""The state that a rank saves: tensors by key, and plain data for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field

from accel_core.errors import CheckpointError
from accel_core.storage.codec import encode, not_plain, require_plain
from accel_core.storage.leaves import Declared, Json, Key, Leaf, declare, full_leaf
from accel_core.storage.wrapped import taken_apart

if TYPE_CHECKING:
    from torch import Tensor


def _nothing(*_: object) -> None:
    """Do nothing."""


@define(eq=False)
class State:
    """A state on one rank, and the callbacks that a save of it calls."""

    leaves: dict[Key, Leaf] = field(factory=dict)
    declared: dict[Key, Declared] = field(factory=dict)
    """The declaration of each leaf, which other ranks receive."""
    shared: dict[str, Json] = field(factory=dict)
    """Plain data that is the same on all ranks; rank 0's data is written."""
    own: dict[str, Json] = field(factory=dict)
    """Plain data that only this rank has."""
    summary_for_ranks: Any = None
    """Plain data about the state that all ranks exchange."""
    merge_summaries: Callable[[State, Sequence[Any], int], None] = _nothing
    """Called with this state, the summaries of all ranks, and the rank; may change `shared` and `own`."""
    check: Callable[[State], None] = _nothing
    """Called with this state if leaves have changed. Raises CheckpointError if leaves do not fit together."""
    members: Callable[[], Mapping[str, Any]] = dict
    """Returns the members of the manifest, without the members of the save itself. Called on rank 0."""

    def add(self, key: Key, leaf: Leaf, *, any_replica_may_write: bool = True) -> None:
        """Add a leaf. Raises CheckpointError if the key is taken, or if a tensor cannot be stored."""
        if key in self.leaves:
            raise CheckpointError(
                f"unit {key[0]!r}: there are two states {key[1]}\na parameter may be in one optimizer only"
            )
        for _, tensor in leaf.shards:
            if not_plain(tensor):
                require_plain(f"{key[1]} of unit {key[0]!r}", tensor)
        self.leaves[key] = leaf
        self.declared[key] = declare(leaf, any_replica_may_write=any_replica_may_write)

    def encode(self, value: Any, path: str, *, replicated: bool = True, in_parts: bool = False) -> Json:
        """Return `value` as tagged JSON; its large tensors become leaves of the unit "".

        Args:
            value: nested plain data and tensors.
            path: name of the value in error messages and in the keys of the leaves.
            replicated: whether other ranks may have equal tensors.
            in_parts: whether to take tensors that wrap others apart, for `put_together`.
        """

        def store(where: str, tensor: Tensor) -> str:
            self.add(("", where), full_leaf(tensor, kind="factored", replicated=replicated))
            return where

        try:
            return encode(taken_apart(value) if in_parts else value, path, store)
        except RecursionError:
            raise CheckpointError(
                f"{path} cannot be stored: it contains itself, or is nested too deeply\n"
                "let state_dict() return a structure of a few levels"
            ) from None
