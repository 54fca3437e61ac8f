"""What keeps a checkpoint from fitting a run: collected, named, and judged once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from attrs import field, frozen

from accel_core.checkpoint.codec import DTYPES, name_of
from accel_core.checkpoint.collect import class_of
from accel_core.checkpoint.plan import refuse

if TYPE_CHECKING:
    from pathlib import Path

    from accel_core.checkpoint.leaf import Leaf
    from accel_core.checkpoint.read import Stored

__all__ = ["Problems"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


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

    def paired(self, what: str, saved: Sequence[Mapping[str, Any]], here: Sequence[T]) -> list[tuple[T, Any]]:
        """Objects and the states saved for them, by position; those that are not of one class are named."""
        self.compare(what, map(str, range(len(saved))), map(str, range(len(here))))
        pairs = []
        for number, (each, item) in enumerate(zip(saved, here, strict=False)):
            if each["class"] == class_of(item):
                pairs.append((item, each["state"]))
            else:
                found = f"is a {each['class']} in the checkpoint, a {class_of(item)} here"
                self.fatal.append(f"{what}{number} {found}")
        return pairs

    def tensor_fits(self, what: str, leaf: Leaf, stored: Stored) -> bool:
        """Whether the stored tensor can be copied into the leaf; if not, the difference is noted."""
        before = len(self.fatal)
        there, here = list(stored.shape), list(leaf.global_shape)
        if there != here:
            self.fatal.append(f"{what} has shape {there} in the checkpoint, {here} here")
        if leaf.layout != stored.layout:
            self.fatal.append(f"{what} has layout {stored.layout} in the checkpoint, {leaf.layout} here")
        for dtype in {tensor.dtype for _, tensor in leaf.shards}:
            if torch.promote_types(DTYPES[stored.dtype], dtype) != dtype:
                loss = f"{name_of(dtype)} here would lose digits"
                self.found.append(f"{what} is {stored.dtype} in the checkpoint; {loss}")
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
