"""What keeps a checkpoint from fitting a run: collected, named, and judged once."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from accel_core.checkpoint.codec import DTYPES, name_of
from accel_core.checkpoint.plan import refuse

if TYPE_CHECKING:
    from pathlib import Path

    from accel_core.checkpoint.leaf import Leaf
    from accel_core.checkpoint.read import Stored

__all__ = ["Problems"]

logger = logging.getLogger(__name__)


@frozen
class Problems:
    """Differences between a checkpoint and a run. Where loading is not strict, only `fatal` ones count."""

    folder: Path
    strict: bool
    found: list[str] = field(factory=list)
    fatal: list[str] = field(factory=list)

    def compare(self, what: str, saved: Iterable[object], here: Iterable[object]) -> None:
        """Name what only one side has."""
        saved, here = dict.fromkeys(saved), dict.fromkeys(here)
        self.found.extend(f"missing in the checkpoint: {what}{name}" for name in here if name not in saved)
        self.found.extend(
            f"unexpected, the run has no such state: {what}{name}" for name in saved if name not in here
        )

    def tensor_fits(self, what: str, leaf: Leaf, stored: Stored) -> bool:
        """Whether the stored tensor can be copied into the leaf; if not, the difference is noted."""
        there, here = (list(stored.shape), stored.layout), (list(leaf.global_shape), leaf.layout)
        for word, one, other in zip(("shape", "layout"), there, here, strict=True):
            if one != other:
                self.fatal.append(f"{what} has {word} {one} in the checkpoint, {other} here")
        for dtype in {tensor.dtype for _, tensor in leaf.shards}:
            if torch.promote_types(DTYPES[stored.dtype], dtype) != dtype:
                loss = f"{name_of(dtype)} here would lose digits"
                self.found.append(f"{what} is {stored.dtype} in the checkpoint; {loss}")
        return there == here

    def warn(self, what: str) -> None:
        """Log what is left out, though nothing is wrong."""
        logger.warning("%s: %s", self.folder, what)

    def settle(self) -> None:
        """Raises CheckpointError if there are problems that count; the others are logged."""
        remedy = "prepare what was prepared when it was saved"
        refuse(
            [*self.fatal, *(self.found if self.strict else ())],
            f"the checkpoint {self.folder} does not fit this run; nothing was loaded",
            remedy if self.fatal else f"{remedy}, or load what fits with strict=False",
            path=str(self.folder),
        )
        for each in self.found:
            self.warn(each)
