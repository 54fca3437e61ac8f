"""The loader that `prepare` returns: a view of one global order, which knows where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch.utils.data import DataLoader

from accel_core.data import options
from accel_core.data.dispatch import SOURCE, dispatched
from accel_core.data.iteration import announce, dealt, own, remove, whole_rounds
from accel_core.data.position import Cursor, Position, Progress
from accel_core.data.prefetch import mover
from accel_core.data.sampler import IndexFeed
from accel_core.data.sharding import COMPLETE, Deal
from accel_core.data.shuffling import decode, encode, unmoved
from accel_core.data.stateful import ShardedIterable
from accel_core.data.uneven import refusing
from accel_core.distributed.logging import get_logger
from accel_core.distributed.nested import can_pin
from accel_core.distributed.random import synchronize_rng_states
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.contract.run import Run

__all__ = ["PreparedLoader", "prepare_loader"]

_logger = get_logger(__name__)

_OWN = frozenset(
    {
        "_run",
        "_synchronized",
        "_cursor",
        "_skip",
        "_skipped",
        "_own_deal",
        "_draw",
        "_dispatches",
        "_reads",
        "_inner",
        "_feed",
        "_kind",
        "_serves_one",
        "_seeded",
        "_move",
    }
)
"""Attributes that the user's loader has no use for; all others are set on it too."""


class PreparedLoader(DataLoader[Any]):
    """A DataLoader whose batches are this reader's share, on the run's device.

    Everything else is the user's own loader's: attributes, workers, collate function. It is iterated
    by all ranks alike. Epochs reshuffle by themselves; the position counts what was handed out.
    """

    def __init__(self, loader: DataLoader[Any], run: Run, device_placement: bool = True) -> None:
        # Not DataLoader.__init__: it would check, and draw defaults for, what the user's loader settled.
        self.__dict__.update(loader.__dict__)
        self.__dict__["_iterator"] = None
        self._run = run
        # On what the order is drawn from ("generator") the readers agree anyway.
        self._synchronized = tuple(name for name in run.config.rng_types if name != "generator")
        self._cursor = Cursor()
        self._skip = self._skipped = 0
        deal, draw = options.deal_of(loader, run), options.draw_of(loader, run)
        self._own_deal, self._draw = deal, draw
        self._dispatches = options.dispatches(loader, run)
        self._reads = not self._dispatches or run.collectives("control").rank == SOURCE
        self._inner = options.inner_of(loader, run)
        """The user's loader, of the user's class, with our order in place of its own."""
        self._inner.__dict__["_iterator"] = None
        self._feed: IndexFeed | None = None
        """One for this loader's life: workers that persist keep the first that they were given."""
        self._kind = options.kind_of(loader, self._inner)
        if not options.is_iterable(loader):
            self._feed = feed = options.feed_of(loader, draw, deal, self._dispatches)
            self._inner.__dict__["sampler" if feed.single else "batch_sampler"] = feed
        elif deal.readers > 1 or self._dispatches:
            shards = options.shards_of(loader, deal, self._dispatches, self._kind == "stateful")
            self._inner.__dict__.update(shards)
        self._serves_one = self._kind == "stateful" or self._persists
        self._seeded = False
        """Workers that persist have drawn their seed, once for all epochs."""
        # Reading ahead in this very process would draw random numbers before their time.
        ahead = loader.num_workers > 0 and self._kind != "stateful"
        if ahead and device_placement and run.config.data.pin_memory and can_pin(run.device):
            self.pin_memory = True  # on the user's loader too, which does so in a thread
        pinned = bool(self.pin_memory) and can_pin(run.device)
        self._move = mover(run, moves=device_placement, ahead=ahead, pinned=pinned)

    # -- what the user and core ask ---------------------------------------------------------------

    @property
    def last(self) -> bool:
        """Whether the user holds the last batch of this epoch."""
        progress = self._cursor.progress
        return progress.count == progress.total

    @property
    def remainder(self) -> int:
        """Samples of the current round, over all readers, that are no padding; -1 if all are real."""
        progress = self._cursor.progress
        return max(COMPLETE, progress.padded.get(progress.count, COMPLETE))

    @property
    def place(self) -> str:
        """Which batch the user holds, for messages."""
        progress = self._cursor.progress
        return f" in batch {progress.count} of epoch {progress.epoch}"

    @property
    def is_unshared(self) -> bool:
        """Whether not every reader has a batch like the one that the user holds."""
        return self._cursor.progress.is_unshared

    @property
    def epoch(self) -> int:
        """Iterations over this loader that were begun before the current, or next, one."""
        return self._cursor.epoch

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all readers take together, where batches have a size."""
        return self._deal.samples

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(0, self._whole_length() - (self._skip or self._skipped))

    def _whole_length(self) -> int:
        if self._feed is not None:
            return len(self._feed)
        if not self._sharded:
            return len(self._inner)
        samples = len(self.dataset)  # type: ignore[arg-type]
        size = self._deal.batch_size or 1
        batches = samples // size if self._deal.drop_last else -(-samples // size)
        return self._deal.length(batches, samples)

    def __getattr__(self, name: str) -> Any:
        # What a subclass of the user's own offers. Reached only where this class has no such name.
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)  # torch's: refuses what cannot be changed any more
        if name in _OWN or name.startswith("__") or (inner := self.__dict__.get("_inner")) is None:
            return
        if hasattr(type(inner), name) or not hasattr(type(self), name):
            setattr(inner, name, options.shared(self, name, value) if self._sharded else value)

    def set_epoch(self, epoch: int) -> None:
        """The number of the next iteration. Not needed: epochs count, and reshuffle, by themselves.

        An epoch other than the one to be resumed starts at its beginning.
        """
        if epoch != self.epoch:
            self._cursor.plan(Progress(epoch=epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position (`Position`), JSON-able: valid at any moment, also between two batches."""
        return self._position().to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position at the next iteration. All ranks.

        A loop over this loader that is running raises AccelError when it asks for its next batch.

        Raises:
            CheckpointError: this loader cannot, and is as it was: it names what has changed.
        """
        position = self.check_state_dict(state)
        for role, generator in self._generators().items():
            if role in position.generators:
                generator.set_state(decode(position.generators[role]))
        midway = position.consumed > 0
        cursor, over = self._cursor, position.is_over(self._deal)
        cursor.cut_off(
            "load_state has moved the dataloader that this loop reads\nleave the loop (break) after loading,"
            " and begin a new one: it goes on where the checkpoint was taken"
        )
        if over:  # the next loop is that of the next epoch, as it would have been
            cursor.plan(Progress(epoch=position.following))
        else:
            same = position.dealt == self._position().dealt
            cursor.plan(
                Progress(
                    epoch=position.epoch,
                    start=position.consumed,
                    drawn=position.drawn,
                    resumed=midway or position.drawn is not None,
                    workers=position.workers if same else None,
                    state=position.state,
                )
            )
            cursor.following = position.following
            if midway and position.left:
                self._tell(position)
        self._inner.__dict__["_iterator"] = None  # workers that persist stand elsewhere
        self._seeded = self._persists and cursor.progress.epoch > 0

    def check_state_dict(self, state: Mapping[str, Any]) -> Position:
        """The position that was saved. Changes nothing.

        Raises:
            CheckpointError: this loader cannot go on there: it names what has changed.
        """
        position = Position.from_json(state, self._position())
        for role, generator in self._generators().items():
            if role in position.generators:  # torch raises where it is no state
                torch.Generator(generator.device).set_state(decode(position.generators[role]))
        midway = position.consumed > 0 and not position.is_over(self._deal)
        if self._kind == "stateful" and self._reads and midway and position.state is None:
            raise CheckpointError(
                "a 'stateful' dataloader was saved mid-epoch where another process read for this one\n"
                "resume with the same data.dispatch_batches, or at the start of an epoch"
            )
        return position

    @contextmanager
    def dealing(self, *, even: bool) -> Iterator[None]:
        """Iterations begun inside pad their last round, or do not. Map-style data only."""
        feed = self._feed
        if feed is None:
            yield
            return
        before, feed.deal = feed.deal, evolve(feed.deal, even=even)
        try:
            yield
        finally:
            feed.deal = before

    # -- iterating --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        options.refuse_recut(self, self._draw, self._own_deal)
        self._skipped, self._skip = self._skip, 0
        skip = self._skipped * self._units_per_round()
        if self._serves_one:
            self._cursor.cut_off(
                "this dataloader was begun anew while this loop over it was running, and its workers (or its"
                " state) serve one loop only\nset persistent_workers=False, or prepare a second DataLoader"
            )
        progress = self._cursor.begin(skip)
        if not progress.resumed:
            synchronize_rng_states(self._synchronized, run=self._run)
        announce(progress.epoch, self.dataset, self.sampler, self.batch_sampler)
        if self._kind == "stateful":  # it is told in its own words where to go on
            progress.count, progress.start = progress.start, 0
        batches: Any = None
        if self._reads:
            batches = self._read(progress, skip)
        else:
            self._follow(progress)
        if self._dispatches:
            pin = self.pin_memory and torch.accelerator.is_available()
            batches = dispatched(self._run, progress, batches, pin=pin)
        if self._move is not None:
            batches = self._move(batches)
        return self._hand_out(batches, progress)

    def _hand_out(self, batches: Iterator[Any], progress: Progress) -> Iterator[Any]:
        active, cursor = self._run.active_loaders, self._cursor
        finished = False
        windows = {unit.window: unit.window.place for unit in self._run.units}
        try:
            active.append(self)
            cursor.hold(progress)
            cursor.check(progress)
            for batch in batches:
                progress.count += 1
                if active[-1] is not self:  # an iterator held by hand stood still meanwhile
                    remove(active, self)
                    active.append(self)
                if cursor.progress is not progress:
                    cursor.hold(progress)
                if progress.is_unshared:
                    with refusing(self._run, self):
                        yield batch
                else:
                    yield batch
                if progress.term != cursor.term:
                    cursor.check(progress)
            finished = True
        finally:  # on `break` too: the generator is closed, or collected
            try:
                remove(active, self)
            except BaseException:  # Ctrl-C came before it had done anything
                remove(active, self)
                raise
            finally:
                cursor.leave(progress, finished=finished)
                for window, place in windows.items():
                    window.end_loop(place)

    def _read(self, progress: Progress, skip: int) -> Iterator[Any]:
        """This reader's batches; rounds, where this process reads for all."""
        behind = 0
        if self._kind == "stateful":
            behind = skip
            if progress.state is not None and not skip:
                self._inner.load_state_dict(progress.state)  # type: ignore[attr-defined]
        if self._feed is not None:
            self._feed.progress = progress
            batches = self._begin(progress)
            if behind:
                batches = islice(batches, behind * (self._deal.readers if self._dispatches else 1), None)
            return dealt(batches, progress, self._deal.readers) if self._dispatches else batches
        whole, odd = divmod(progress.start, self._deal.batches)
        if self._sharded:
            self._inner.dataset.skip = odd  # type: ignore[attr-defined]
        found = islice(self._begin(progress), whole + behind, None)
        if self._sharded:
            self._inner.dataset.skip = 0  # type: ignore[attr-defined]
        stated = ((item, self._state()) for item in found)
        return whole_rounds(stated, progress) if self._dispatches else own(stated, progress, self._sharded)

    def _begin(self, progress: Progress) -> Iterator[Any]:
        generator = self.generator or torch.default_generator
        fresh = self._inner.__dict__["_iterator"] is None
        if self._seeded and fresh and not progress.resumed:
            # Only the order is drawn here: workers that persist would have drawn nothing more.
            if self._feed is not None:
                self._draw.open(progress, 0)
            progress.resumed = True
        self._seeded = self._persists
        if not progress.resumed:
            if self.num_workers and fresh:
                progress.workers = encode(generator.get_state())
            return iter(self._inner)
        # A resumed epoch was begun before the save: beginning it again must not draw anything anew.
        with unmoved(self._generators()):
            if progress.workers is not None:
                generator.set_state(decode(progress.workers))
            return iter(self._inner)

    def _follow(self, progress: Progress) -> None:
        """Draw what the process that reads draws: streams seeded alike stay alike."""
        seeded, self._seeded = self._seeded, self._persists
        if progress.resumed:
            return
        if not seeded:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        if self._feed is not None:
            self._draw.open(progress, 0)

    def _state(self) -> Any:
        """What a stateful loader says of itself."""
        return self._inner.state_dict() if self._kind == "stateful" else None  # type: ignore[attr-defined]

    # -- set-up -----------------------------------------------------------------------------------

    @property
    def _deal(self) -> Deal:
        return self._own_deal if self._feed is None else self._feed.deal

    @property
    def _persists(self) -> bool:
        return self.num_workers > 0 and self.persistent_workers

    @property
    def _sharded(self) -> bool:
        return isinstance(self._inner.dataset, ShardedIterable)

    def _units_per_round(self) -> int:
        """What a round counts for in the position: samples, batches or rounds, by kind."""
        if self._kind == "indexed":
            return self._deal.samples or 1
        return 1 if self._kind == "stateful" else self._deal.batches

    def _generators(self) -> dict[str, torch.Generator]:
        found = {"loader": self.generator, "order": self._draw.generator}
        return {
            role: generator for role, generator in found.items() if isinstance(generator, torch.Generator)
        }

    def _length(self) -> int | None:
        try:
            return len(self._draw.items) if self._feed is not None else None
        except TypeError:  # a sampler without a length
            return None

    def _position(self) -> Position:
        cursor, length = self._cursor, self._length()
        progress = cursor.progress
        consumed = progress.start + progress.count * self._units_per_round()
        state = progress.state
        if self._kind == "stateful" and self._feed is not None and self._reads and progress.count:
            state = self._state()
        return Position(
            kind=self._kind,
            epoch=progress.epoch,
            consumed=consumed if length is None else min(consumed, length),
            drawn=progress.drawn,
            workers=progress.workers,
            generators={
                role: encode(generator.get_state()) for role, generator in self._generators().items()
            },
            length=length,
            dealt=(self._deal.batches, self.batch_size or 1, self.num_workers),
            state=state,
            following=max(cursor.following, progress.epoch + 1),
            ended=progress.count > 0 and self._is_over(progress),
            left=not cursor.running,
        )

    def _is_over(self, progress: Progress) -> bool:
        """Whether no reader gets another batch of this epoch, as far as this one knows."""
        if self._dispatches:
            return progress.following == 0
        deal = self._deal
        alike = deal.even or deal.drop_last or deal.readers == 1 or progress.is_unshared
        # Of several workers each deals its own stream, and knows the end of that one alone.
        alike = alike or (progress.is_last_of_all and self.num_workers <= 1)
        return alike and progress.count == progress.total

    def _tell(self, position: Position) -> None:
        """Say where the next loop goes on, if the one before was broken off and then saved."""
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
    """The loader of this rank: its reader's share of the data, on the run's device. All ranks.

    Raises:
        ConfigError: the `data` settings cannot be had for this loader; the message names the setting.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    options.check(loader, run)
    return PreparedLoader(loader, run, device_placement)
