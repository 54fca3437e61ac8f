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
    """One iteration over a prepared loader: pairs of a batch on the host, and a function that hands it out.

    `hand_out()` returns the batch on the device, and makes the loader's place that of this batch: `last`,
    `remainder`, `place`, and what `gather_for_metrics` leaves out. Called again, it does the same again. In
    between, the loader's place is that of the batch handed out last, whatever was read since.

        with closing(loader.host_batches()) as batches:
            while window := [*islice(batches, 4)]:
                items = sum(count(batch) for batch, _ in window)
                for _, hand_out in window:
                    train(hand_out(), items)
                batches.settle()

    A save counts the batches that were handed out before the last `settle`: one inside a window resumes at
    the window's start. Reading takes from the data what a plain loop takes for as many batches. The loader is
    the run's active one from the first batch that is read until `close`. That ends the epoch if all its
    batches were read and settled, and leaves the epoch as `break` does if not.

    A batch that is handed out after `close` is placed, and no place of the loader's: one that a program has
    held back is not in a plain loop either.

    Batches are on the device already where the device's plugin reads the loader itself (`wrap_dataloader`).

    place: a batch to the device. enter, hold, leave: the loader's own, as a plain loop calls them.
    """

    _run: Run
    _progress: Progress
    _batches: Iterator[Any]
    _place: Callable[[Any], Any] | None
    _enter: Callable[[Progress], object]
    _hold: Callable[[Progress], None]
    _leave: Callable[..., None]
    _is_entered: bool = field(default=False, init=False)
    """True from the first batch that is read until the end."""
    _read: int = field(default=0, init=False)
    _is_exhausted: bool = field(default=False, init=False)
    _checks: ExitStack = field(factory=ExitStack, init=False)

    @property
    def is_whole(self) -> bool:
        """True if batches are as they were read: no plugin has taken this rank's part of them yet."""
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
        """Have saves from now on count the batches up to the one handed out last."""
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
