"""Differences between a checkpoint and a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from accel_core.errors import CheckpointError
from accel_core.storage.plan import raise_problems
from accel_core.storage.tensor_bytes import DTYPES, name_of

if TYPE_CHECKING:
    from accel_core.storage.leaves import Leaf
    from accel_core.storage.tensors import Stored

Action = tuple[str, Callable[[], object]]
"""(name of a state, function that restores it)."""

logger = logging.getLogger(__name__)


class MisfitError(CheckpointError):
    """The checkpoint does not fit the run, whether or not it is damaged."""


@frozen
class Problems:
    """Differences between a checkpoint and a run."""

    folder: object
    """The checkpoint's folder, for messages."""
    strict: bool
    found: list[str] = field(factory=list)
    """Differences that are errors if `strict` is set, and are logged otherwise."""
    fatal: list[str] = field(factory=list)
    """Differences that are always errors."""

    def compare(self, what: str, saved: Iterable[object], here: Iterable[object]) -> None:
        """Note the names that only the checkpoint or only the run has."""
        saved, here = dict.fromkeys(saved), dict.fromkeys(here)
        if saved.keys() == here.keys():
            return
        lacks, extra = "missing in the checkpoint", "unexpected, the run has no such state"
        self.found.extend(f"{lacks}: {what}{name}" for name in here if name not in saved)
        self.found.extend(f"{extra}: {what}{name}" for name in saved if name not in here)

    def tensor_fits(self, what: str, leaf: Leaf, stored: Stored) -> bool:
        """Note differences; return whether the stored tensor can be copied into the leaf."""
        if stored.layout != leaf.layout:
            layouts = f"{stored.layout} in the checkpoint, {leaf.layout} here"
            self.fatal.append(f"{what} has layout {layouts}")
        if stored.shape != tuple(leaf.global_shape):
            shapes = f"{[*stored.shape]} in the checkpoint, {[*leaf.global_shape]} here"
            self.found.append(f"{what} has shape {shapes}")
        saved = DTYPES[stored.dtype]
        for dtype in {dtype for _, tensor in leaf.shards if (dtype := tensor.dtype) != saved}:
            if not _holds(dtype, saved):
                loss = f"{name_of(dtype)} here may lose digits"
                self.found.append(f"{what} is {stored.dtype} in the checkpoint; {loss}")
        return stored.layout == leaf.layout and stored.shape == tuple(leaf.global_shape)

    @contextmanager
    def noting_errors(self, what: str) -> Iterator[None]:
        """Note any error in the context as a fatal problem; CheckpointError passes through."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # generators of torch, Python and numpy raise errors of many types
            self.fatal.append(f"{what}: {type(error).__name__}: {error}")

    def warn(self, what: str) -> None:
        """Log a difference that is not an error."""
        logger.warning("%s: %s", self.folder, what)

    def raise_if_any(self) -> None:
        """Raise MisfitError if there are errors; else log the differences in `found`."""
        remedy = "prepare what was prepared when it was saved"
        raise_problems(
            [*self.fatal, *(self.found if self.strict else ())],
            f"the checkpoint {self.folder} does not fit this run; nothing was loaded",
            remedy if self.fatal else f"{remedy}, or load what fits with strict=False",
            path=str(self.folder),
            kind=MisfitError,
        )
        for each in self.found:
            self.warn(each)


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return True if this dtype can hold every number of the other."""
    try:
        return torch.promote_types(other, dtype) == dtype
    except RuntimeError:  # torch promotes no float8, and no unsigned integers of several bytes
        return False
