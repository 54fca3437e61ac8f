"""The state that a rank saves: tensors by key, and plain data for JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import define, field

from accel_core.errors import CheckpointError
from accel_core.storage.codec import encode, not_plain, require_plain
from accel_core.storage.leaves import Json, Leaf, whole
from accel_core.storage.plan import Declared, Key, declare
from accel_core.storage.wrapped import taken_apart

if TYPE_CHECKING:
    from torch import Tensor


def _nothing(state: State) -> None:
    """Check nothing."""


@define(eq=False)
class State:
    """A state on one rank.

    declared: how each leaf is declared. shared: plain data that all ranks have alike; rank 0's is written.
    own: plain data that only this rank has. note: what ranks tell each other about it. check: is given this
    state when leaves are new, and raises CheckpointError for some that do not belong together.
    """

    leaves: dict[Key, Leaf] = field(factory=dict)
    declared: dict[Key, Declared] = field(factory=dict)
    shared: dict[str, Json] = field(factory=dict)
    own: dict[str, Json] = field(factory=dict)
    note: Any = None
    check: Callable[[State], None] = _nothing

    def add(self, key: Key, leaf: Leaf, *, spread: bool = True) -> None:
        """Add a leaf. Raises CheckpointError if the key is taken."""
        if key in self.leaves:
            raise CheckpointError(
                f"unit {key[0]!r}: there are two states {key[1]}\na parameter may be in one optimizer only"
            )
        for _, tensor in leaf.shards:
            if not_plain(tensor):
                require_plain(f"{key[1]} of unit {key[0]!r}", tensor)
        self.leaves[key] = leaf
        self.declared[key] = declare(leaf, spread=spread)

    def encode(self, value: Any, path: str, *, replicated: bool = True, in_parts: bool = False) -> Json:
        """Return `value` as tagged JSON; its large tensors become leaves of the unit "".

        in_parts: take tensors that wrap others apart, for `put_together`.
        """

        def store(where: str, tensor: Tensor) -> str:
            self.add(("", where), whole(tensor, kind="factored", replicated=replicated))
            return where

        try:
            return encode(taken_apart(value) if in_parts else value, path, store)
        except RecursionError:
            raise CheckpointError(
                f"{path} cannot be stored: it contains itself, or is nested too deeply\n"
                "let state_dict() return a structure of a few levels"
            ) from None
