"""The loader that `prepare` returns: a reader's share of one global order.

It has a position that can be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch.utils.data import DataLoader

from accel_core.data.ahead import keep
from accel_core.data.dispatch import dispatched
from accel_core.data.epoch import EpochSource
from accel_core.data.fingerprint import choice, fingerprint
from accel_core.data.options import plan_loader
from accel_core.data.position import Cursor, Position, Progress, number_of_epoch
from accel_core.data.prefetch import batch_mover
from accel_core.data.process_streams import decode, encode
from accel_core.data.sampler import PinnableCollate
from accel_core.data.sharding import NO_PADDING, with_last
from accel_core.data.uneven import checking_forwards
from accel_core.distributed.logging import get_logger
from accel_core.distributed.nested import can_pin
from accel_core.distributed.random import synchronize_rng_states
from accel_core.errors import AccelError, CheckpointError

if TYPE_CHECKING:
    from accel_core.contract.run import Run

_logger = get_logger(__name__)

_OWN = frozenset({"_run", "_plan", "_cursor", "_source", "_skip", "_skipped", "_move", "_choice"})
"""Attributes that the user's loader has no use for; all others are set on it too."""


class _Loop(chain[Any]):
    """A loop over a prepared loader: its batches, then what follows them."""

    close: Callable[[], None]


class PreparedLoader(DataLoader[Any]):
    """A DataLoader whose batches are this reader's share, on the run's device.

    Everything else is the user's own loader's: attributes, workers, collate function. It is iterated
    by all ranks alike. Epochs reshuffle by themselves; the position counts what was handed out.
    """

    def __init__(self, loader: DataLoader[Any], run: Run, device_placement: bool = True) -> None:
        plan = plan_loader(loader, run)
        # Not DataLoader.__init__: it would check, and draw defaults for, what the user's loader settled.
        self.__dict__.update(loader.__dict__, _iterator=None)
        self._run = run
        self._plan = plan
        self._cursor = Cursor()
        self._skip = self._skipped = 0
        self._choice: str | None = None  # until it is asked for
        self._source = EpochSource(plan)
        # Reading ahead in this very process would draw random numbers before their time.
        ahead = loader.num_workers > 0 and plan.kind != "stateful"
        if ahead and device_placement and run.config.data.pin_memory and can_pin(run.device):
            self.pin_memory = True  # on the user's loader too, which does so in a thread
            plan.inner.__dict__["collate_fn"] = PinnableCollate(plan.inner.collate_fn)
        pinned, read_here = bool(self.pin_memory) and can_pin(run.device), not loader.num_workers
        self._move = batch_mover(run, moves=device_placement, ahead=ahead, pinned=pinned, read_here=read_here)

    # -- what the user and core ask ---------------------------------------------------------------

    @property
    def last(self) -> bool:
        """True while the user holds the last batch of this epoch."""
        progress = self._cursor.progress
        return progress.count == progress.total

    @property
    def remainder(self) -> int:
        """Number of samples of the current round, over all readers, without padding.

        -1 if the round has no padding.
        """
        progress = self._cursor.progress
        return max(NO_PADDING, progress.padded.get(progress.count, NO_PADDING))

    @property
    def real_readers(self) -> int:
        """Number of readers whose sample of the current round is not padding.

        -1 if the round has no padding, or gives a reader several samples. A sample may be a whole batch that
        the dataset makes.
        """
        return self.remainder if self._plan.sharding.samples == self._plan.sharding.readers else -1

    @property
    def place(self) -> str:
        """The batch that the user holds, for messages."""
        progress = self._cursor.progress
        return f" in batch {progress.count} of epoch {progress.epoch}"

    @property
    def is_unshared(self) -> bool:
        """True while the user holds a batch of a round in which some readers have none."""
        return self._cursor.progress.is_unshared

    @property
    def epoch(self) -> int:
        """Number of iterations that were begun before the current one, or the next."""
        return self._cursor.epoch

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all readers take together, where batches have a size."""
        return self._plan.sharding.samples

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def data_in_words(self) -> str:
        """Data that all ranks must have alike, to read shares of it; "" if unknown."""
        if self._plan.dispatches or self._plan.sampler is None:
            return ""
        return fingerprint(self.dataset)

    def __len__(self) -> int:
        return max(0, self._whole_length() - (self._skip or self._skipped))

    def _whole_length(self) -> int:
        plan, sharding = self._plan, self._plan.sharding
        if plan.sampler is not None or not plan.is_sharded_iterable:
            return len(plan.inner if plan.sampler is None else plan.sampler)
        samples, size = len(self.dataset), sharding.batch_size or 1  # type: ignore[arg-type]
        batches = samples // size if sharding.drop_last else -(-samples // size)
        return sharding.length(batches, samples)

    def __getattr__(self, name: str) -> Any:
        # A subclass of the user's own may offer more. Python asks here only for names that this class lacks.
        if name.startswith("__") or "_plan" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._plan.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)  # torch's: refuses what cannot be changed any more
        if name in _OWN or name.startswith("__") or (plan := self.__dict__.get("_plan")) is None:
            return
        if hasattr(type(plan.inner), name) or not hasattr(type(self), name):
            batches = self.batch_size is not None
            setattr(plan.inner, name, plan.adapted(name, value, batches=batches))

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next iteration.

        Not needed: epochs count, and reshuffle, by themselves. An epoch other than the one to be resumed
        starts at its beginning.
        """
        number = number_of_epoch(epoch)
        if number != self.epoch:
            self._cursor.plan(Progress(epoch=number))

    def state_dict(self) -> dict[str, Any]:
        """Return the position (`Position`) as JSON values; valid at any moment."""
        return self._position().to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position at the next iteration. All ranks.

        A loop over this loader that is running raises AccelError when it asks for its next batch.

        Raises:
            CheckpointError: the loader has changed, and the error names how. Nothing is changed then.
        """
        position = self.check_state_dict(state)
        for role, generator in self._plan.generators.items():
            if role in position.generators:
                generator.set_state(decode(position.generators[role]))
        midway, now = position.consumed > 0, self._position()
        cursor, over = self._cursor, position.is_over(self._plan.sharding)
        if over or not midway:
            self._tell_of_dataset(position, now)
        cursor.cut_off(
            "load_state has moved the dataloader that this loop reads\nleave the loop (break) after loading,"
            " and begin a new one: it goes on where the checkpoint was taken"
        )
        if over:  # the next loop is that of the next epoch, as it would have been
            cursor.plan(Progress(epoch=position.following, draws=-1 if position.left else position.draws))
        else:
            same = position.dealt == now.dealt
            cursor.plan(
                Progress(
                    epoch=position.epoch,
                    start=position.consumed,
                    drawn=position.drawn,
                    draws=position.draws,
                    resumed=midway or position.drawn is not None or bool(position.streams),
                    # Other workers may draw the order as they start, which must not be undone.
                    opened=position.opened and position.dealt[-1] == self.num_workers,
                    workers=position.workers if same or position.kind == "replay" else None,
                    streams=position.streams,
                    first=tuple(position.first) if same else (),
                    state=position.state,
                )
            )
            cursor.following = position.following
            if midway:
                self._tell(position)
        self._source.restart(position)

    def check_state_dict(self, state: Mapping[str, Any]) -> Position:
        """Return the position that was saved. Nothing is changed.

        Raises:
            CheckpointError: the loader cannot go on there; the error names what has changed.
        """
        here = self._position()
        position = Position.from_json(state, here)
        for role, generator in self._plan.generators.items():
            if role in position.generators:  # torch raises where it is no state
                torch.Generator(generator.device).set_state(decode(position.generators[role]))
        midway = position.consumed > 0 and not position.is_over(self._plan.sharding)
        if midway and position.sampler not in ("", here.sampler):
            raise CheckpointError(
                "a dataloader was saved in the middle of an epoch in the order of"
                f" {position.sampler}, and here the order is that of {here.sampler}\n"
                "resume with the sampler and the samples that it was saved with (give what splits data a"
                " seed), or at the start of an epoch"
            )
        if self._plan.kind == "stateful" and self._plan.reads and midway and position.state is None:
            raise CheckpointError(
                "a 'stateful' dataloader was saved mid-epoch where another process read for this one\n"
                "resume with the same data.dispatch_batches, or at the start of an epoch"
            )
        return position

    @contextmanager
    def padding(self, *, even: bool) -> Iterator[None]:
        """Have iterations begun inside pad their last round, or not. Map-style data only."""
        sampler = self._plan.sampler
        if sampler is None:
            yield
            return
        before, sampler.sharding = sampler.sharding, evolve(sampler.sharding, even=even)
        try:
            yield
        finally:
            sampler.sharding = before

    # -- iterating --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        plan, cursor = self._plan, self._cursor
        plan.check_unchanged(self)
        skipped, self._skip = self._skip, 0
        self._skipped, self._choice = skipped, None
        if plan.kind == "stateful" or plan.persists:
            cursor.cut_off(
                "this dataloader was begun anew while this loop over it was running, and its workers (or its"
                " state) serve one loop only\nset persistent_workers=False, or prepare a second DataLoader"
            )
        progress = cursor.begin(skipped * plan.units_per_round)
        if plan.compare_epoch is not None:
            plan.compare_epoch(progress.epoch)
        if not (progress.resumed or progress.opened):
            synchronize_rng_states(plan.synchronized, run=self._run)
        _set_epoch(progress.epoch, self.dataset, self.sampler, self.batch_sampler)
        if plan.kind == "stateful":  # the loader's own state says where to go on
            progress.count, progress.start = progress.start, 0
        if plan.reads_ahead:
            batches: Any = self._read_ahead(progress, skipped)
        else:
            batches = self._source.open(progress, skipped)
        if plan.dispatches:
            pin = self.pin_memory and torch.accelerator.is_available()
            batches = dispatched(self._run, progress, batches, pin=pin)
        if self._move is not None:
            batches = self._move(batches)
        done = progress.count + progress.start // plan.units_per_round - skipped
        batches = self._run.record.reads(batches, self, done)
        handed_out = self._hand_out(batches, progress)
        loop = _Loop(handed_out, self._refuse_rest(progress))
        loop.close = handed_out.close
        return loop

    def _refuse_rest(self, progress: Progress) -> Iterator[Any]:
        """Raise where a loop is asked for more after an error, which ends no epoch.

        torch's loader would give the next batch, but a generator cannot go on.
        """
        if progress.is_broken:
            raise AccelError(
                f"batch {progress.count + 1} of epoch {progress.epoch} of the dataloader of"
                f" {type(self.dataset).__name__} could not be given, and the loop was asked for the next one:"
                " a prepared dataloader cannot leave a batch out\n"
                "catch the error in the dataset, or begin a new loop"
            )
        yield from ()

    def _read_ahead(self, progress: Progress, skipped: int) -> Iterator[Any]:
        """Yield a batch once the next one is read.

        The epoch begins with the first, as Accelerate's does.
        """
        source: Any = self._source.open(progress, skipped)
        for kept, _ in with_last(map(keep, source)):
            yield kept()

    def _hand_out(self, batches: Iterator[Any], progress: Progress) -> Generator[Any]:
        active, cursor = self._run.active_loaders, self._cursor
        finished, remove = False, _remove  # a name of its own: globals are gone at the interpreter's end
        first = progress.count
        try:
            active.append(self)
            cursor.hold(progress)
            cursor.check(progress)
            for batch in batches:
                progress.count += 1
                if active[-1] is not self:  # the user holds several iterators, and others went on meanwhile
                    _remove(active, self)
                    active.append(self)
                if cursor.progress is not progress:
                    cursor.hold(progress)
                if progress.padded and progress.is_unshared:
                    with checking_forwards(self._run):
                        yield batch
                else:
                    yield batch
                if progress.term != cursor.term:
                    cursor.check(progress)
            finished = True
            if first < progress.count != progress.total:
                self._tell_of_other_batches(progress.count)
            self._plan.shuffle.catch_up(progress)  # a process that reads for all stops at the last round
        except BaseException as error:
            progress.is_broken = not isinstance(error, GeneratorExit)
            raise
        finally:  # on `break` too: the generator is closed, or collected
            try:
                remove(active, self)
            except BaseException:  # Ctrl-C came before anything was removed
                remove(active, self)
                raise
            finally:
                self.__dict__["_skipped"] = 0  # `__setattr__` needs globals too
                cursor.leave(progress, finished=finished)

    def _tell_of_other_batches(self, count: int) -> None:
        _logger.warning(
            "%s has an __iter__ of its own, which gave %d batches, not those of its sampler: neither the last"
            " batch, nor padding, nor the position can be told; leave batches out, or add them, in the"
            " sampler or the dataset",
            type(self._plan.inner).__name__,
            count,
        )

    # -- its position -----------------------------------------------------------------------------

    def _position(self) -> Position:
        cursor, length = self._cursor, self._plan.length
        progress = cursor.progress
        consumed = progress.start + progress.count * self._plan.units_per_round
        plan, state = self._plan, progress.state
        if plan.sampler is not None and plan.reads and progress.count:
            state = self._source.state()
        return Position(
            kind=plan.kind,
            epoch=progress.epoch,
            consumed=consumed if length is None else min(consumed, length),
            sampler=self._order_in_words() if plan.kind in ("indexed", "batches") else "",
            drawn=progress.drawn,
            draws=progress.draws,
            workers=progress.workers,
            streams=progress.streams,
            first=progress.first,
            generators={
                role: encode(generator.get_state()) for role, generator in self._plan.generators.items()
            },
            length=length,
            dealt=(self._plan.sharding.batches, self.batch_size or 1, self.num_workers),
            state=state,
            following=max(cursor.following, progress.epoch + 1),
            ended=progress.count > 0 and self._is_over(progress),
            left=not cursor.running,
            opened=progress.opened,
            begun=self._source.begun,
            dataset=self._source.untouched(),
        )

    def _order_in_words(self) -> str:
        if self._choice is None:  # in an epoch it stays, and indices may be many
            self._choice = choice(self.dataset, self._plan.shuffle.items)
        return f"{self._plan.shuffle.name}{self._choice}"

    def _is_over(self, progress: Progress) -> bool:
        """Return whether this reader knows that no reader gets another batch."""
        if self._plan.dispatches:
            return progress.following == 0
        sharding = self._plan.sharding
        alike = sharding.even or sharding.drop_last or sharding.readers == 1 or progress.is_unshared
        # Each of several workers shares out its own stream, and knows the end of that stream only.
        alike = alike or (progress.is_last_of_all and self.num_workers <= 1)
        return alike and progress.count == progress.total

    def _tell_of_dataset(self, position: Position, now: Position) -> None:
        """Warn of a dataset that may not begin the epoch to come at its beginning."""
        if position.begun and now.consumed and not now.ended and self._source.keeps_its_place:
            _logger.warning(
                "the dataset %s keeps its own state, and that of the start of an epoch was not saved: the"
                " next epoch may go on where this process has read to; load in a new process, or reset the"
                " dataset",
                type(self.dataset).__name__,
            )

    def _tell(self, position: Position) -> None:
        """Warn of an epoch that was left early, or may go on in another order."""
        begun_with = position.workers if self.num_workers else position.streams
        if position.kind == "replay" and self._plan.reads and not begun_with:
            _logger.warning(
                "the dataloader of %s has no random state that this epoch was begun with: where its order is"
                " random, samples are lost or repeated; resume with the number of workers it was saved with,"
                " without persistent_workers",
                type(self.dataset).__name__,
            )
        if not position.left:
            return
        done, length = position.consumed, position.length
        where = f"after {done} of {length}" if length is not None else f"after {done}"
        _logger.warning(
            "the dataloader of %s was saved after its loop had been left: its next loop goes on %s samples or"
            " batches of epoch %d; loader.set_epoch(%d) begins the next epoch instead",
            type(self.dataset).__name__,
            where,
            position.epoch,
            position.following,
        )


def prepare_loader(loader: DataLoader[Any], run: Run, device_placement: bool = True) -> PreparedLoader:
    """Return this rank's loader: its reader's share, on the run's device. All ranks.

    Raises:
        ConfigError: a `data` setting does not work with this loader; the message names the setting.
    """
    return loader if isinstance(loader, PreparedLoader) else PreparedLoader(loader, run, device_placement)


def _set_epoch(epoch: int, *holders: Any) -> None:
    """Tell datasets and samplers that shuffle by epoch which one begins."""
    told: list[Any] = []
    for holder in (*holders, *(getattr(holder, "sampler", None) for holder in holders)):
        if hasattr(holder, "set_epoch") and not any(holder is other for other in told):
            told.append(holder)
            holder.set_epoch(epoch)


def _remove(active: list[Any], loader: object) -> None:
    """Take the last mention of `loader` out of the list."""
    for index in reversed(range(len(active))):
        if active[index] is loader:
            del active[index]
            return
