"""Leaving out the first batches of one iteration."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from accel_core.data.loader import PreparedLoader
from accel_core.errors import ConfigError

L = TypeVar("L", bound=DataLoader[Any])


def skip_first_batches(loader: L, num_batches: int = 0) -> L:
    """Return the loader, whose next iteration (only) leaves out the first `num_batches` batches.

    The number counts from the start of the epoch: on a loader that resumes within an epoch, it replaces the
    position. On a loader that skips already, the numbers add up. A prepared loader of map-style data does not
    read the batches that it skips.

    Raises:
        ConfigError: `num_batches` is not a whole number of 0 or more.
    """
    number = _whole_number(num_batches)
    if number is None:
        raise ConfigError(
            f"skip_first_batches: {num_batches!r:.80} batches cannot be left out\n"
            "give a whole number, 0 or more"
        )
    if isinstance(loader, PreparedLoader):
        view = copy.copy(loader)
        view._skip += number
        return view
    kind, skips = type(loader), 0
    if isinstance(loader, _SkipsOnce):
        skips = loader._batches_to_skip
    else:
        kind = type(kind.__name__, (_SkipsOnce, kind), {})
    skipping: L = object.__new__(kind)
    skipping.__dict__.update(loader.__dict__, _iterator=None)
    skipping.__dict__.update(_batches_to_skip=skips + number, _skipped_batches=0)
    return skipping


def _whole_number(given: Any) -> int | None:
    """Return Python's number for a whole one of any library; None for other values.

    Other values are True, what numpy has masked, and negative numbers too.
    """
    is_flag = isinstance(given, bool) or str(getattr(given, "dtype", "")) in ("bool", "torch.bool")
    is_masked = str(getattr(given, "mask", "")) == "True"
    try:
        number = None if is_flag or is_masked else operator.index(given)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without a value
        return None
    return number if number is not None and number >= 0 else None


class _SkipsOnce:
    """Base class that `skip_first_batches` adds to the class of a loader that is not prepared."""

    _batches_to_skip: int
    _skipped_batches: int

    def __iter__(self) -> Iterator[Any]:
        self._skipped_batches, self._batches_to_skip = self._batches_to_skip, 0
        return self._to_the_end(islice(super().__iter__(), self._skipped_batches, None))  # type: ignore[misc]

    def _to_the_end(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        finally:
            self._skipped_batches = 0

    def __len__(self) -> int:
        whole: int = super().__len__()  # type: ignore[misc]
        return max(0, whole - (self._batches_to_skip or self._skipped_batches))
