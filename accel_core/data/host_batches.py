"""Batches of a prepared loader that are read before the loop trains on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import define, field

from accel_core.data.position import Progress
from accel_core.data.uneven import checking_forwards

if TYPE_CHECKING:
    from accel_core.contract.run import Run


@define(eq=False)
class HostBatches(Iterator[tuple[Any, Callable[[], Any]]]):
    """One iteration over a prepared loader: pairs of a batch on the host and a function that hands it out.

    `hand_out()` returns the batch on the device, and sets the loader's position to this batch: `last`,
    `remainder`, `place`, and the samples that `gather_for_metrics` leaves out. A second call does the same
    again. Between calls, the loader's position is the batch handed out last, however many were read since.

        with closing(loader.host_batches()) as batches:
            while window := [*islice(batches, 4)]:
                items = sum(count(batch) for batch, _ in window)
                for _, hand_out in window:
                    train(hand_out(), items)
                batches.settle()

    A save counts the batches that were handed out before the last `settle`: a save inside a window resumes at
    the window's start. Reading takes as much from the data as a plain loop takes for the same number of
    batches. The loader is the run's active loader from the first batch that is read until `close`. `close`
    ends the epoch if all its batches were read and settled; otherwise it leaves the epoch as `break` does.

    After `close`, `hand_out()` still moves the batch to the device but no longer changes the loader's
    position.

    Batches are on the device already if the device's plugin reads the loader itself (`wrap_dataloader`).

    Attributes:
        _place: moves a batch to the device; None if batches stay as they were read.
        _enter: the loader's own method, called as a plain loop calls it; likewise `_hold` and `_leave`.
    """

    _run: Run
    _progress: Progress
    _batches: Iterator[Any]
    _place: Callable[[Any], Any] | None
    _enter: Callable[[Progress], object]
    _hold: Callable[[Progress], None]
    _leave: Callable[..., None]
    _is_entered: bool = field(default=False, init=False)
    """True from the first batch that is read until `close`."""
    _read: int = field(default=0, init=False)
    _is_exhausted: bool = field(default=False, init=False)
    _checks: ExitStack = field(factory=ExitStack, init=False)

    @property
    def is_whole(self) -> bool:
        """True if `hand_out` places batches, so that plugins have not yet taken this rank's part of them."""
        return self._place is not None

    def __next__(self) -> tuple[Any, Callable[[], Any]]:
        if not self._is_entered:
            self._enter(self._progress)
            self._is_entered = True
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_exhausted = True
            raise
        self._read += 1
        return batch, partial(self._hand_out, self._read, batch)

    def settle(self) -> None:
        """Make saves from now on count the batches up to the one handed out last."""
        if self._is_entered:
            self._progress.settle()

    def close(self) -> None:
        """End the iteration."""
        self._checks.close()
        if self._is_entered:
            self._is_entered = False
            finished = self._is_exhausted and self._progress.settled == self._read
            self._leave(self._progress, finished=finished)

    def _hand_out(self, number: int, batch: Any) -> Any:
        self._checks.close()
        if self._is_entered:
            self._hold(self._progress)
            self._progress.count = number
            if self._progress.is_unshared:
                self._checks.enter_context(checking_forwards(self._run))
        return batch if self._place is None else self._place(batch)
