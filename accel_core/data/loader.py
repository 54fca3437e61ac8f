"""The loader that `prepare` returns: a reader's share of one global order, with a position to save."""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count, islice, repeat
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch.utils.data import DataLoader

from accel_core.data.dispatch import dispatched, rounds_of_iterable, rounds_of_samples
from accel_core.data.fingerprint import fingerprint, fingerprint_of_batch
from accel_core.data.host_batches import HostBatches
from accel_core.data.options import LoaderPlan, SharedBy, plan_loader
from accel_core.data.position import Cursor, Position, Progress, decode, encode
from accel_core.data.prefetch import Placement, placement_of
from accel_core.data.sharding import NO_PADDING, PARTIAL_ROUND, with_last
from accel_core.data.shuffling import drawn_seed
from accel_core.data.uneven import checking_forwards
from accel_core.data.workers import iterate
from accel_core.distributed.exchange import collective_call, is_debugging
from accel_core.distributed.logging import get_logger
from accel_core.distributed.random import synchronize_rng_states
from accel_core.errors import CheckpointError
from accel_core.storage.tensor_bytes import can_pin

if TYPE_CHECKING:
    from accel_core.contract.run import Run

_logger = get_logger(__name__)
_orders = count(1)


class PreparedLoader(DataLoader[Any]):
    """A DataLoader whose batches are this reader's share, on the run's device.

    Attributes, workers and collate function are the user's loader's. All ranks iterate over it alike. Epochs
    reshuffle by themselves; the position counts the batches that were handed out.
    """

    _run: Run
    _plan: LoaderPlan
    _cursor: Cursor
    _skip: int
    _skipped: int
    _has_begun: bool
    _is_told: bool
    _placement: Placement | None

    def __init__(
        self, loader: Any, run: Run, device_placement: bool = True, already_sharded: bool | None = None
    ) -> None:
        if already_sharded is None:
            already_sharded = run.config.data.already_sharded
        source = run.hooks.data_source(loader, run.topology, already_sharded)
        loader = loader if source is None else source.loader
        # Without workers, reading ahead would draw random numbers of this process too early.
        ahead, pinned = loader.num_workers > 0, bool(loader.pin_memory) and can_pin(run.device)
        # Not DataLoader.__init__, which would check arguments and draw defaults a second time.
        self.__dict__.update(
            loader.__dict__,
            _iterator=None,
            _run=run,
            _plan=plan_loader(loader, run, source, already_sharded),
            _cursor=Cursor(),
            _skip=0,
            _skipped=0,
            _has_begun=False,  # True after the first epoch began: persistent workers draw one seed only
            _is_told=False,  # True after the warning that the dataset has no state
            _placement=placement_of(run, moves=device_placement, ahead=ahead, pinned=pinned),
        )

    # -- its batches, length and position ---------------------------------------------------------

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

        -1 if the round has no padding, or if it gives a reader several samples. A sample may be a whole batch
        that the dataset makes.
        """
        return self.remainder if self._plan.sharding.samples == self._plan.sharding.readers else -1

    @property
    def place(self) -> str:
        """Text that names the batch that the user holds, for messages."""
        progress = self._cursor.progress
        return f" in batch {progress.count} of epoch {progress.epoch}"

    @property
    def is_unshared(self) -> bool:
        """True while the user holds a batch of a round in which some readers have none."""
        return self._cursor.progress.is_unshared

    @property
    def epoch(self) -> int:
        """Number of the current iteration, or between loops of the next one; the first has number 0."""
        return self._cursor.epoch

    @property
    def batches_done(self) -> int:
        """Number of batches of this epoch that this reader was handed, in runs before a resume too.

        Before a loop, the value numbers the loop's first batch: `enumerate(loader, loader.batches_done)`.
        """
        cursor = self._cursor
        progress = cursor.progress if cursor.running else cursor.planned or Progress()
        return (self._skip or progress.start // self._plan.units_per_round) + progress.count

    @property
    def is_held(self) -> bool:
        """True if the program draws by turns from this loader and from the loader of a loop around it."""
        return all(each.is_held for each in self._cursor.running)

    def hands_out(self, batch: Any) -> bool:
        """Return whether the user holds this very batch of the loader."""
        return any(each.batch is not None and each.batch() is batch for each in self._cursor.running)

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples that all readers take per round; None if batches have no fixed size."""
        samples = self._plan.sharding.samples
        return samples and samples * (self._run.topology.readers if self.shared_by == "dataset" else 1)

    @property
    def shared_by(self) -> SharedBy:
        """What shares out the data between readers."""
        return self._plan.shared_by

    @property
    def shared_because(self) -> str:
        """The reason for `shared_by`, for people."""
        return self._plan.reason

    @property
    def total_dataset_length(self) -> int:
        """Number of samples of the whole dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def data_in_words(self) -> str:
        """Fingerprint of the dataset, equal on all ranks that read shares of it; "" if unknown."""
        if self.shared_by != "index" or self._plan.sampler is None:
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
        # The user's loader may be a subclass with more attributes. Python calls this for missing names only.
        if name.startswith("__") or "_plan" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._plan.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)  # torch refuses attributes that are fixed after __init__
        if name.startswith("_") or (plan := self.__dict__.get("_plan")) is None:
            return  # not an attribute of the user's loader
        if hasattr(type(plan.inner), name) or not hasattr(type(self), name):
            batches = self.batch_size is not None
            setattr(plan.inner, name, plan.adapted(name, value, batches=batches))

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next iteration. Optional, since epochs count and reshuffle by themselves.

        If `epoch` is not that iteration's number already, the epoch starts at its beginning, also after a
        resume.
        """
        number = operator.index(epoch)  # an int, since a position is saved as JSON
        if number != self.epoch:
            self._cursor.plan(Progress(epoch=number))

    def state_dict(self) -> dict[str, Any]:
        """Return the position (`Position`) as JSON values; valid at any moment."""
        position = self._position()
        if position.kind == "replay" and position.consumed and not (position.ended or self._is_told):
            self._is_told = True
            _logger.warning(
                "the dataset %s has no state: a resume in the middle of its epoch reads it again from its"
                " start and leaves %d batches out, which loses and repeats samples where its order is random;"
                " give it state_dict and load_state_dict, and set data.use_stateful_dataloader",
                type(self.dataset).__name__,
                position.consumed,
            )
        return position.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position at the next iteration. Call it on all ranks.

        A loop over this loader that is already running is not affected.

        Raises:
            CheckpointError: the loader has changed since the save; the message names the change. Nothing is
                changed.
        """
        saved, cursor = self.check_state_dict(state), self._cursor
        for role, generator in self._plan.generators.items():
            if role in saved.generators:
                generator.set_state(decode(saved.generators[role]))
        if saved.is_over(self._plan.sharding):  # the next loop reads the next epoch
            cursor.plan(Progress(epoch=saved.following))
        else:
            cursor.plan(Progress(saved.epoch, saved.consumed, saved.begun, saved.drawn, saved.state))
            cursor.following = saved.following
        self._plan.inner.__dict__["_iterator"] = None  # workers start anew
        self._has_begun = saved.begun or saved.epoch > 0

    def check_state_dict(self, state: Mapping[str, Any]) -> Position:
        """Return the saved position if this loader can continue from it. Nothing is changed.

        Raises:
            CheckpointError: the loader cannot continue from the position; the message names the change.
        """
        here = self._position()
        share = tuple(state.get("share", ()))
        position = Position(**{**state, "dealt": tuple(state["dealt"]), "share": share})
        if position.kind != here.kind:
            raise CheckpointError(
                f"a dataloader was saved as {position.kind!r}, but the one prepared here is {here.kind!r}\n"
                "prepare the loaders in the order in which they were saved"
            )
        if position.consumed and not position.is_over(self._plan.sharding):
            position.require_same(here)
        return position

    @contextmanager
    def padding(self, *, even: bool) -> Iterator[None]:
        """Return a context; iterations begun inside pad their last round if `even`. Map-style data only."""
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
        progress, batches = self._begin()
        if self._placement is not None:
            batches = self._placement.all(batches)
        return self._hand_out(self._timed(batches, progress), progress)

    def host_batches(self) -> HostBatches:
        """Begin an iteration whose batches stay on the host until each is handed out.

        For loops that must look at several batches before they train on the first one.
        """
        progress, batches = self._begin()
        placement = self._placement
        if placement is not None and placement.reads:
            batches, placement = placement.all(batches), None
        progress.settled = 0
        place = None if placement is None else placement.one
        own = self._enter, self._hold, self._leave
        return HostBatches(self._run, progress, self._timed(batches, progress), place, *own)

    def _begin(self) -> tuple[Progress, Iterator[Any]]:
        """Begin the next iteration; return its progress and this reader's batches on the host."""
        plan, cursor = self._plan, self._cursor
        skipped, self._skip = self._skip, 0
        self._skipped = skipped
        progress = cursor.begin(skipped * plan.units_per_round)
        if not progress.begun:
            synchronize_rng_states(plan.synchronized, run=self._run)
        _set_epoch(progress.epoch, plan.inner, self.dataset, self.sampler, self.batch_sampler)
        if plan.epoch is not None:
            plan.epoch.fill_(progress.epoch)
        batches = self._read(progress, skipped)
        if plan.dispatches:
            pin = self.pin_memory and torch.accelerator.is_available()
            batches = dispatched(self._run, progress, batches, pin=pin)
        assert batches is not None
        if plan.meets and is_debugging():
            batches = self._compared(batches, progress)
        return progress, batches

    def _timed(self, batches: Iterator[Any], progress: Progress) -> Any:
        observe = self._run.hooks.step("read_batches")
        if observe is None:
            return batches
        return observe(batches, self, progress.start // self._plan.units_per_round - self._skipped)

    def _read(self, progress: Progress, skipped: int) -> Iterator[Any] | None:
        """Return this reader's batches, rounds if this rank reads for all, None if it does not read.

        An epoch that resumes or skips leaves batches out, depending on the plan's kind:

            kind      position counts          units per round  batches are left out
            indexed   samples of the order     its samples      before they are read: the order starts later
            batches   the user's batches       its batches      before they are read, likewise
            replay    batches of the dataset   its batches      after they are read: rounds here, single
                                                                batches by the dataset of this reader's share
            stateful  rounds                   1                by the loader's state; `skipped` ones as above
        """
        plan, inner, share = self._plan, self._plan.inner, self._plan.sharding.batches
        dataset: Any = inner.dataset
        draws = not (progress.begun or (plan.persists and self._has_begun))
        progress.begun = self._has_begun = True
        if not plan.reads:  # draw as the process that reads does, so that random streams stay equal
            if draws:
                drawn_seed(inner.generator)
            if plan.sampler is not None:
                plan.shuffle.open(progress, 0)
            return None
        if plan.sampler is not None:
            plan.sampler.progress = progress
            batches = self._iterate_inner(draws)
            if plan.dispatches:
                return rounds_of_samples(batches, progress, plan.sharding.readers)
            if not plan.meets:
                return batches
            if plan.sampler.batch_size is None or plan.length is None:  # how many batches is not certain
                return self._own_share(zip(batches, repeat(None)), progress)
            self._note_ends(progress, plan.sampler.batches_from(progress.start))
            return batches
        left_out = progress.start // share
        if plan.kind == "stateful":
            left_out = skipped
            if progress.state is not None and not skipped:
                inner.load_state_dict(progress.state)  # type: ignore[attr-defined]
        elif plan.is_sharded_iterable:
            dataset.skip = progress.start % share
        items = islice(self._iterate_inner(draws), left_out, None)
        stated = ((item, self._inner_state()) for item in items)
        return rounds_of_iterable(stated, progress) if plan.dispatches else self._own_share(stated, progress)

    def _iterate_inner(self, draws: bool) -> Iterator[Any]:
        """Begin an epoch of the inner loader; draw the seed of its workers if `draws`."""
        inner, seed_workers = self._plan.inner, self._plan.seed_workers
        if draws and seed_workers is None:
            return iterate(inner)  # torch draws the seed
        own, private = inner.generator, torch.Generator()
        if draws and seed_workers is not None:
            private.manual_seed(seed_workers(drawn_seed(own)))
        else:
            private.set_state((own or torch.default_generator).get_state())
        inner.generator = private
        try:
            return iterate(inner)
        finally:
            inner.generator = own

    def _inner_state(self) -> Any:
        """Return the state of a stateful loader, None for other loaders."""
        inner: Any = self._plan.inner
        return inner.state_dict() if self._plan.kind == "stateful" else None

    def _own_share(self, stated: Iterator[tuple[Any, Any]], progress: Progress) -> Iterator[Any]:
        """Yield an iterable dataset's batches, reading one item ahead to find the end.

        `stated` has pairs (item of the inner loader, the loader's state after the item). Readers of data that
        shares itself out tell each other whether they have a next batch, until one of them has none.
        """
        sharded, meets, number, others = self._plan.is_sharded_iterable, self._plan.meets, 0, [True]
        progress.ends = 0 if meets else progress.ends
        for number, ((item, state), last) in enumerate(with_last(stated), start=1):
            (batch,), real_samples = item if sharded else ((item,), NO_PADDING)
            if meets and number == 1:
                others = self._exchange(progress, 1, True)
            if not all(others):
                meets, real_samples = False, PARTIAL_ROUND
            elif meets:
                others = self._exchange(progress, number + 1, not last)
                progress.ends = 0 if any(others) else number
            if real_samples != NO_PADDING:
                progress.padded[number] = real_samples
            if last:
                progress.total = number
            if state is not None:
                progress.states[number] = state
            yield batch
        if meets and not number:
            self._exchange(progress, 1, False)

    def _note_ends(self, progress: Progress, batches: int) -> None:
        """Compare the numbers of batches that are left to the readers of data that shares itself out."""
        everyone = self._exchange(progress, 0, batches)
        progress.ends = batches if min(everyone) == max(everyone) else 0
        progress.padded |= dict.fromkeys(range(min(everyone) + 1, batches + 1), PARTIAL_ROUND)

    def _exchange(self, progress: Progress, number: int, value: Any) -> list[Any]:
        """Return every rank's value about a batch of an epoch of data that shares itself out. Collective."""
        doing = f"batch {number} of epoch {progress.epoch} (already_sharded)"
        with collective_call(self._run, "world", doing, None, objects=True) as call:
            return call.all_objects(value)

    def _compared(self, batches: Iterator[Any], progress: Progress) -> Iterator[Any]:
        """Yield the batches; warn if the readers' first ones are equal, which shares cannot be."""
        first = [*islice(batches, 1)]
        if len({*(said := self._exchange(progress, 0, fingerprint_of_batch(first)))}) == 1 and said[0]:
            _logger.warning(
                "all %d readers have the same first batch of %s, which is said to share itself out (%s): if"
                " it does not, leave already_sharded unset",
                self._run.topology.readers,
                type(self.dataset).__name__,
                self._plan.reason,
            )
        yield from chain(first, batches)

    def _hand_out(self, batches: Iterator[Any], progress: Progress) -> Generator[Any]:
        active, cursor, finished = self._run.active_loaders, self._cursor, False
        batch: Any  # a variable of this frame: nothing is stored for each batch
        progress.batch = lambda: batch
        self._enter(progress)
        try:
            for batch in batches:
                progress.count += 1
                if progress.states:
                    progress.state = progress.states.pop(progress.count)
                if active[-1] is not self or cursor.progress is not progress:
                    self._hold(progress)  # the user holds several iterators, and another one was used last
                if progress.padded and progress.is_unshared:
                    with checking_forwards(self._run):
                        yield batch
                else:
                    yield batch
            finished = True
        finally:  # on `break` too: the generator is closed, or collected
            self._leave(progress, finished=finished)

    def _enter(self, progress: Progress) -> None:
        """Make this loader and iteration the active ones, before the first batch."""
        progress.order = next(_orders)
        progress.is_inner = self._is_inside_a_loop()
        self._run.active_loaders.append(self)
        self._cursor.hold(progress)

    def _hold(self, progress: Progress) -> None:
        """Record that this loader and iteration handed out the latest batch."""
        active = self._run.active_loaders
        if active[-1] is not self:
            self._note_held(progress)
            self._remove()
            active.append(self)
        self._cursor.hold(progress)

    def _others(self) -> Iterator[Progress]:
        """Yield the running iterations of other loaders."""
        for loader in self._run.active_loaders:
            if loader is not self:
                yield from loader._cursor.running

    def _is_inside_a_loop(self) -> bool:
        return any(not each.is_held for each in self._others())

    def _only_others_train(self) -> bool:
        """Return whether optimizers have stepped in loops of other loaders, and in none of this one."""
        cursors = [loader._cursor for loader in self._run.trained_from]
        return bool(cursors) and all(each is not self._cursor for each in cursors)

    def _note_held(self, progress: Progress) -> None:
        """Mark the iterations of other loaders that began after this one and still run at its next batch.

        A `for` loop inside this loop's body would have ended: the program holds iterators, and draws from
        them by turns.
        """
        for each in () if progress.is_held else self._others():
            if each.order > progress.order:
                each.is_held, each.is_inner = True, False

    def _leave(self, progress: Progress, *, finished: bool) -> None:
        """Undo `_enter`. Uses no globals, which are gone when the interpreter ends."""
        self._remove()
        self._note_held(progress)
        self.__dict__["_skipped"] = 0
        self._cursor.leave(progress, finished=finished)

    def _remove(self) -> None:
        """Remove this loader's last entry from the run's active loaders."""
        active = self._run.active_loaders
        for index in reversed(range(len(active))):
            if active[index] is self:
                del active[index]
                return

    # -- its position -----------------------------------------------------------------------------

    def _position(self) -> Position:
        plan, cursor = self._plan, self._cursor
        progress, length, sharding = cursor.progress, plan.length, plan.sharding
        was_left = cursor.planned is None and not cursor.running
        if was_left and (self._is_inside_a_loop() or self._only_others_train()):
            progress = Progress(epoch=cursor.following)  # a validation that was cut short, say
        consumed = progress.start + progress.counted * plan.units_per_round
        return Position(
            kind=plan.kind,
            epoch=progress.epoch,
            following=max(cursor.following, progress.epoch + 1),
            consumed=consumed if length is None else min(consumed, length),
            length=length,
            dealt=()
            if plan.resumes_anywhere
            else (
                sharding.batches,
                self.batch_size or 1,
                self.num_workers,
                plan.dispatches and plan.kind == "stateful",
            ),
            share=plan.share,
            sampler="" if plan.sampler is None else plan.shuffle.name,
            drawn=progress.drawn,
            generators={role: encode(generator.get_state()) for role, generator in plan.generators.items()},
            state=progress.state,
            begun=progress.begun,
            ended=progress.is_last_of_all(sharding, self.num_workers),
        )


def prepare_loader(
    loader: Any, run: Run, device_placement: bool = True, already_sharded: bool | None = None
) -> PreparedLoader:
    """Return this rank's loader: its reader's share, on the run's device. Call it on all ranks.

    `already_sharded` stands for the option of section `data`, unless it is None.

    Raises:
        ConfigError: a `data` setting does not work with this loader; the message names the setting.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    return PreparedLoader(loader, run, device_placement, already_sharded)


def _set_epoch(epoch: int, *holders: Any) -> None:
    """Call `set_epoch(epoch)` of the holders and their samplers that have it, once per object."""
    told: list[Any] = []
    for holder in (*holders, *(getattr(holder, "sampler", None) for holder in holders)):
        if hasattr(holder, "set_epoch") and not any(holder is other for other in told):
            told.append(holder)
            holder.set_epoch(epoch)
