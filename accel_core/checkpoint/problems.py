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

    def missing(self, what: str) -> None:
        """The run has it, the checkpoint does not."""
        self.found.append(f"missing in the checkpoint: {what}")

    def unexpected(self, what: str) -> None:
        """The checkpoint has it, the run does not."""
        self.found.append(f"unexpected, the run has no such state: {what}")

    def compare(self, what: str, saved: Iterable[str], here: Iterable[str]) -> None:
        """Name what only one side has."""
        saved, here = dict.fromkeys(saved), dict.fromkeys(here)
        for name in (name for name in here if name not in saved):
            self.missing(f"{what}{name}")
        for name in (name for name in saved if name not in here):
            self.unexpected(f"{what}{name}")

    def tensor_fits(self, what: str, leaf: Leaf, stored: Stored) -> bool:
        """Whether the stored tensor can be copied into the leaf; if not, the difference is noted."""
        before = len(self.fatal)
        if leaf.global_shape != stored.shape:
            self.fatal.append(
                f"{what} has shape {list(stored.shape)} in the checkpoint, {list(leaf.global_shape)} here"
            )
        if leaf.layout != stored.layout:
            self.fatal.append(f"{what} has layout {stored.layout} in the checkpoint, {leaf.layout} here")
        saved = DTYPES[stored.dtype]
        for dtype in {tensor.dtype for _, tensor in leaf.shards}:
            if torch.promote_types(saved, dtype) != dtype:
                self.found.append(
                    f"{what} is {stored.dtype} in the checkpoint; {name_of(dtype)} here would lose digits"
                )
        return len(self.fatal) == before

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
            logger.warning("%s: %s", self.folder, each)
