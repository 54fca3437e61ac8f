"""Values that a load hands over as they were saved, of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core.checkpoint.read import Checkpoint
    from accel_core.checkpoint.reader import Block


class EncodedValues:
    """Encoded values of a checkpoint, decoded once all that the run needs is here."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._all: list[tuple[Any, str, Callable[[Any], object]]] = []

    def add(self, encoded: Any, path: str, take: Callable[[Any], object]) -> None:
        """Let `decode` give the value to `take`. path: of the value, in words."""
        self._all.append((encoded, path, take))

    def handed(self, encoded: Any, path: str, take: Callable[[Any], object]) -> Callable[[], object]:
        """Return a function that gives the value to `take`. Call it after `decode`."""
        value: list[Any] = []
        self.add(encoded, path, value.append)
        return lambda: take(*value)

    def blocks(self) -> set[Block]:
        """Return the blocks that `decode` reads."""
        return self._checkpoint.blocks_of_values(encoded for encoded, *_ in self._all)

    def decode(self) -> None:
        """Decode them all. Raises CheckpointError."""
        for encoded, path, take in self._all:
            take(self._checkpoint.decode(encoded, path))
        self._all.clear()
