"""The batches of one epoch as a loader's workers give them.

An epoch begins at its beginning or in the middle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from accel_core.data.ahead import keep, with_last_kept
from accel_core.data.dispatch import rounds_of_iterable, rounds_of_samples
from accel_core.data.fingerprint import content
from accel_core.data.process_streams import ProcessStreams, decode, encode, preserve_rng
from accel_core.data.sharding import NO_PADDING, with_last
from accel_core.data.stateful import is_stateful, state_of

if TYPE_CHECKING:
    from accel_core.data.options import LoaderPlan
    from accel_core.data.position import Position, Progress, Streams

_logger = logging.getLogger(__name__)


class EpochSource:
    """Epochs of a plan's inner loader, from their beginning or from the middle on.

    Beginning one draws the random numbers that a loader draws then.

    An epoch that does not start at its beginning leaves batches out, by the kind of the plan:

        kind      position counts          units per round  batches are left out
        indexed   samples of the order     its samples      before they are read: the order starts later
        batches   the user's batches       its batches      before they are read, likewise
        replay    batches of the dataset   its batches      after they are read: rounds here, single batches
                                                            by the dataset of this reader's share
        stateful  rounds                   1                by the loader's own state; skipped rounds as above
    """

    def __init__(self, plan: LoaderPlan) -> None:
        self._plan = plan
        self.begun = False
        """An epoch was begun: workers that persist have drawn their only seed."""

    def open(self, progress: Progress, skipped: int) -> Iterator[Any] | None:
        """Return this reader's batches, rounds if it reads for all, None if it does not.

        skipped: rounds that the user asked to leave out, which `progress` counts.
        """
        plan, batches_per_round = self._plan, self._plan.sharding.batches
        inner: Any = plan.inner
        hold = _as_it_is if inner.num_workers else keep  # what a worker read is in memory of its own
        seeded, self.begun = plan.persists and self.begun, True
        anew, progress.opened = not (progress.resumed or progress.opened), True
        if not plan.reads:
            self._follow(progress, seeded, anew=anew)
            return None
        left_out = progress.start // batches_per_round if plan.kind == "replay" else 0
        if plan.kind == "stateful":
            left_out = skipped
            if progress.state is not None and not skipped:
                inner.load_state_dict(progress.state)
        if plan.sampler is not None:
            plan.sampler.progress = progress
            readers = plan.sharding.readers
            batches = islice(
                self._begin(progress, seeded, anew=anew), left_out * (readers if plan.dispatches else 1), None
            )
            return rounds_of_samples(map(hold, batches), progress, readers) if plan.dispatches else batches
        if plan.is_sharded_iterable:
            inner.dataset.skip = progress.start % batches_per_round
        if plan.kind == "replay" and not inner.num_workers:
            items = self._read_here(progress, left_out)
        else:
            begun = self._begin(progress, seeded, anew=anew)
            items = islice(self._compared(begun, progress), left_out, None)
        if plan.is_sharded_iterable:
            inner.dataset.skip = 0
        stated = ((item, self.state()) for item in items)
        if plan.dispatches:
            return rounds_of_iterable(stated, progress, hold)
        return self._own(stated, progress)

    def state(self) -> Any:
        """Return the own position of a stateful loader."""
        inner: Any = self._plan.inner
        return inner.state_dict() if self._plan.kind == "stateful" else None

    def untouched(self) -> Any:
        """Return the state of a dataset that keeps its place, before anything was read."""
        return state_of(self._dataset) if self.keeps_its_place and not self.begun else None

    def restart(self, position: Position) -> None:
        """Have the next epoch, from this position on, start workers anew."""
        self._plan.inner.__dict__["_iterator"] = None
        if self.begun and not position.begun and position.dataset is not None:
            self._dataset.load_state_dict(position.dataset)
        self.begun = position.begun

    @property
    def keeps_its_place(self) -> bool:
        """True if a stateful loader reads, in this process, a dataset that has a state."""
        plan = self._plan
        if plan.kind != "stateful" or not plan.reads or plan.inner.num_workers:
            return False
        return is_stateful(self._dataset)

    @property
    def _dataset(self) -> Any:
        """The user's own."""
        dataset: Any = self._plan.inner.dataset
        return dataset.dataset if self._plan.is_sharded_iterable else dataset

    def _own(self, stated: Iterator[tuple[Any, Any]], progress: Progress) -> Iterator[Any]:
        """Yield an iterable dataset's batches; reading one ahead finds the end.

        stated: (item of the inner loader, the loader's state after that).
        """
        sharded = self._plan.is_sharded_iterable
        ahead = with_last(stated) if self._plan.inner.num_workers else with_last_kept(stated)
        for number, ((item, state), last) in enumerate(ahead, start=progress.count + 1):
            (batch,), real_samples = item if sharded else ((item,), NO_PADDING)
            if real_samples != NO_PADDING:
                progress.padded[number] = real_samples
            if last:
                progress.total = number
            progress.state = state
            yield batch

    def _read_here(self, progress: Progress, left_out: int) -> Iterator[Any]:
        """Return an iterable dataset's items, whose order it may draw as it is read."""
        plan = self._plan
        streams = evolve(plan.shuffle.streams, generators=plan.generators)
        before = streams.states()
        if not progress.resumed:
            progress.streams = (before,)
            items = iter(plan.inner)
            return self._read_first(items, progress, left_out, streams, streams.states())
        streams.restore(next(iter(progress.streams), {}))
        try:
            items = iter(plan.inner)
            begun = streams.states()
        finally:
            streams.restore(before)
        return self._read_again(items, progress, left_out, streams, begun)

    def _read_first(
        self, items: Iterator[Any], progress: Progress, left_out: int, streams: ProcessStreams, begun: Streams
    ) -> Iterator[Any]:
        """Yield the items of an epoch that begins here.

        begun: the states that the beginning has left.
        """
        now = streams.states()
        if now != begun:  # another loader has begun in between
            progress.streams = (*progress.streams, now)
        yield from islice(self._compared(items, progress), left_out, None)

    def _read_again(
        self, items: Iterator[Any], progress: Progress, left_out: int, streams: ProcessStreams, begun: Streams
    ) -> Iterator[Any]:
        """Yield the rest of an epoch that was begun before the save."""
        before = streams.states()
        streams.restore(progress.streams[1] if len(progress.streams) > 1 else begun)
        try:
            items = self._compared(items, progress)
            read = [*islice(items, 1)]
            first = streams.states()
            # The item after the last one handed out had been read, too, when the position was saved.
            held = [*islice(chain(read, items), left_out, left_out + 1)]
            streams.warn_of_draws(type(self._plan.inner.dataset).__name__, first, before)
        finally:
            streams.restore(before)
        yield from chain(held, items)

    def _compared(self, items: Iterator[Any], progress: Progress) -> Iterator[Any]:
        """Yield the items of a dataset that is read from its start.

        Warns where the first is another one than in the epoch that was saved.
        """
        for item in islice(items, 1) if self._plan.kind == "replay" else ():
            batches = item[0] if self._plan.is_sharded_iterable else item
            first = self._plan.sharding.reader, content(batches)
            if progress.first[:1] == first[:1] and progress.first != first:
                _logger.warning(
                    "the dataset %s, read again, does not begin with the batch that epoch %d began with"
                    " before the checkpoint; if its order is another one, samples are lost or repeated:"
                    " seed it by the number that set_epoch gives, or give it state_dict and load_state_dict",
                    type(self._dataset).__name__,
                    progress.epoch,
                )
            progress.first = first
            yield item
        yield from items

    def _begin(self, progress: Progress, seeded: bool, *, anew: bool) -> Iterator[Any]:
        """Begin an epoch of the inner loader, anew or as it was begun before the save.

        seeded: its workers have drawn their seed.
        """
        plan, inner = self._plan, self._plan.inner
        generator = inner.generator or torch.default_generator
        starts_workers = inner.__dict__["_iterator"] is None
        if seeded and starts_workers and anew:
            # Only the order is drawn here: workers that persist would have drawn nothing more.
            if plan.sampler is not None:
                plan.shuffle.open(progress, 0)
            progress.resumed, anew = True, False
        if anew:
            if inner.num_workers and starts_workers:
                progress.workers = encode(generator.get_state())
            return iter(inner)
        # A resumed epoch was begun before the save: beginning it again must not draw anything anew.
        draws = progress.draws
        with preserve_rng(plan.generators):
            if progress.workers is not None:
                generator.set_state(decode(progress.workers))
            batches = iter(inner)
        # Workers that were handed indices had draws made, of which the generators know nothing now.
        due, progress.draws = progress.draws, draws
        plan.shuffle.draw_until(progress, due)
        return batches

    def _follow(self, progress: Progress, seeded: bool, *, anew: bool) -> None:
        """Draw as the process that reads does: streams seeded alike stay alike."""
        plan = self._plan
        if not anew:
            return
        if not seeded:
            torch.empty((), dtype=torch.int64).random_(generator=plan.inner.generator)
        if plan.sampler is not None:
            plan.shuffle.open(progress, 0)


def _as_it_is(item: Any) -> Callable[[], Any]:
    return lambda: item
