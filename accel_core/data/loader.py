"""The loader that `prepare` returns: a view of one global order, which knows where it stands."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from attrs import define, evolve, field
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from accel_core.data.draw import Draw, decode, encode, unmoved
from accel_core.data.feed import IndexFeed, ShardedIterable, ShareCollate, ShareWorker
from accel_core.data.order import COMPLETE, Deal, with_last
from accel_core.data.position import Kind, Position, Progress
from accel_core.errors import ConfigError
from accel_core.random import synchronize_rng_states

if TYPE_CHECKING:
    from accel_core.config.schema import DataLoaderConfiguration
    from accel_core.run import Run
    from accel_core.world import Topology

__all__ = ["PreparedLoader", "prepare_loader", "skip_first_batches"]

L = TypeVar("L", bound=DataLoader[Any])


@define(eq=False)
class _Cursor:
    """Where a loader and its views stand. pending: `progress` has yet to be iterated."""

    progress: Progress = field(factory=Progress)
    pending: bool = True

    def begin(self, skip: int) -> Progress:
        last = self.progress
        progress = last if self.pending else Progress(epoch=last.epoch + 1)
        if skip:
            progress.start = skip
        self.progress, self.pending = progress, False
        return progress

    def finish(self, progress: Progress) -> None:
        if self.progress is progress:
            self.progress, self.pending = Progress(epoch=progress.epoch + 1), True


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
        self._place = _placement(run, device_placement)
        # "generator" is what the order is drawn from, which is agreed on anyway.
        self._synchronized = tuple(name for name in run.config.rng_types if name != "generator")
        self._cursor = _Cursor()
        self._skip = 0
        self._deal, self._draw = _deal(loader, run), _draw(loader, run)
        self._feed: IndexFeed | None = None
        self._kind: Kind = "replay"
        self._inner = copy.copy(loader)
        """The user's loader, of the user's class, with our order in place of its own."""
        self._inner.__dict__["_iterator"] = None
        if isinstance(loader.dataset, IterableDataset):
            self._shard_iterable(loader)
        else:
            self._feed_indices(loader)

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
        return progress.padded.get(progress.count, COMPLETE)

    @property
    def epoch(self) -> int:
        """Iterations over this loader that were begun before the current, or next, one."""
        return self._cursor.progress.epoch + (not self._cursor.pending and not self._active())

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all readers take together, where batches have a size."""
        return self._deal.samples

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        if self._feed is not None:
            return len(self._feed)
        if self._deal.readers == 1:
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

    def set_epoch(self, epoch: int) -> None:
        """The number of the next iteration. Not needed: epochs count, and reshuffle, by themselves.

        An epoch other than the one to be resumed starts at its beginning.
        """
        if epoch != self.epoch:
            self._cursor.progress, self._cursor.pending = Progress(epoch=epoch), True

    def state_dict(self) -> dict[str, Any]:
        """The position (`Position`), JSON-able: valid at any moment, also between two batches."""
        return self._position().to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position at the next iteration. All ranks.

        Raises:
            CheckpointError: this loader cannot: it names what has changed.
        """
        position = Position.from_json(state, self._position())
        for role, generator in self._generators().items():
            if role in position.generators:
                generator.set_state(decode(position.generators[role]))
        resumed = position.consumed > 0 or position.drawn is not None
        self._cursor.progress = Progress(position.epoch, position.consumed, position.drawn, resumed)
        self._cursor.pending = True

    @contextmanager
    def dealing(self, *, even: bool) -> Iterator[None]:
        """Iterations begun inside pad their last round, or do not. Map-style data only."""
        deal, feed = self._deal, self._feed
        if feed is not None:
            self._use(evolve(deal, even=even), evolve(feed, deal=evolve(deal, even=even)))
        try:
            yield
        finally:
            if feed is not None:
                self._use(deal, feed)

    # -- iterating --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip, self.__dict__["_skip"] = self._skip * self._units_per_round(), 0
        progress = self._cursor.begin(skip)
        if not progress.resumed:
            synchronize_rng_states(self._synchronized, run=self._run)
        _announce(progress.epoch, self.dataset, self.sampler, self.batch_sampler)
        if self._feed is not None:
            self._feed.begin(progress)
        # A resumed epoch was begun before the save: beginning it again must not draw anything anew.
        with unmoved(self._generators()) if progress.resumed else nullcontext():
            batches: Iterator[Any] = iter(self._inner)
        if self._feed is None:
            batches = self._rounds(batches, progress)
        return self._hand_out(batches, progress)

    def _hand_out(self, batches: Iterator[Any], progress: Progress) -> Iterator[Any]:
        active, place = self._run.active_loaders, self._place
        active.append(self)
        try:
            if place is None:
                for batch in batches:
                    progress.count += 1
                    yield batch
            else:
                for batch in batches:
                    progress.count += 1
                    yield place(batch)
            self._cursor.finish(progress)
        finally:  # on `break` too: the generator is closed, or collected
            _remove(active, self)

    def _rounds(self, batches: Iterator[Any], progress: Progress) -> Iterator[Any]:
        """An iterable dataset's batches. Its end is known only by reading one batch ahead."""
        ahead = with_last(islice(batches, progress.start, None))
        for number, (item, last) in enumerate(ahead, start=1):
            batch, real = item if self._deal.readers > 1 else (item, COMPLETE)
            if real != COMPLETE:
                progress.padded[number] = real
            if last:
                progress.total = number
            yield batch

    # -- set-up -----------------------------------------------------------------------------------

    def _feed_indices(self, loader: DataLoader[Any]) -> None:
        single = loader.batch_sampler is None
        own_batches = not single and type(loader.batch_sampler) is not BatchSampler
        self._kind = "batches" if own_batches else "indexed"
        size = None if own_batches else (1 if single else loader.batch_sampler.batch_size)  # type: ignore[union-attr]
        self._use(self._deal, IndexFeed(draw=self._draw, deal=self._deal, batch_size=size, single=single))

    def _use(self, deal: Deal, feed: IndexFeed) -> None:
        self._deal, self._feed = deal, feed
        self._inner.__dict__["sampler" if feed.single else "batch_sampler"] = feed

    def _shard_iterable(self, loader: DataLoader[Any]) -> None:
        if self._deal.readers == 1:
            return
        single = loader.batch_size is None
        shard = ShardedIterable(loader.dataset, self._deal, loader.batch_size or 1)  # type: ignore[arg-type]
        self._inner.__dict__.update(
            dataset=shard,
            batch_size=None,
            batch_sampler=None,
            drop_last=False,
            collate_fn=ShareCollate(loader.collate_fn, single),
            worker_init_fn=ShareWorker(loader.worker_init_fn),
        )

    def _active(self) -> bool:
        return any(loader._cursor is self._cursor for loader in self._run.active_loaders)

    def _units_per_round(self) -> int:
        """What a round counts for in the position: samples, batches or rounds, by kind."""
        return {"indexed": self._deal.samples or 1, "batches": self._deal.batches, "replay": 1}[self._kind]

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
        progress, length = self._cursor.progress, self._length()
        consumed = progress.start + progress.count * self._units_per_round()
        return Position(
            kind=self._kind,
            epoch=progress.epoch,
            consumed=consumed if length is None else min(consumed, length),
            drawn=progress.drawn,
            generators={
                role: encode(generator.get_state()) for role, generator in self._generators().items()
            },
            length=length,
            per_round=(self._deal.readers, self.batch_size or 1, self.num_workers)
            if self._feed is None
            else (),
        )


def prepare_loader(loader: DataLoader[Any], run: Run, *, device_placement: bool = True) -> PreparedLoader:
    """The loader of this rank: its reader's share of the data, on the run's device. All ranks.

    Raises:
        ConfigError: the `data` settings cannot be had for this loader; the message names the setting.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    _refuse(loader, run.config.data, run.topology)
    return PreparedLoader(loader, run, device_placement)


def skip_first_batches(loader: L, num_batches: int = 0) -> L:
    """The same loader, whose next iteration (and only that) leaves out its first batches.

    Counts from the start of the epoch: on a loader that is to resume mid-epoch it says where, and
    does not skip on top. A prepared loader of map-style data does not read what
    it skips.
    """
    if isinstance(loader, PreparedLoader):
        view = copy.copy(loader)
        view.__dict__["_skip"] = num_batches
        return view
    kind = type(loader)
    skipping: L = object.__new__(type(kind.__name__, (_SkipsOnce, kind), {}))
    skipping.__dict__.update(loader.__dict__, _iterator=None, _skip=num_batches)
    return skipping


class _SkipsOnce:
    """Mixed into the class of a loader that is not prepared."""

    _skip: int

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return islice(super().__iter__(), skip, None)  # type: ignore[misc]


def _deal(loader: DataLoader[Any], run: Run) -> Deal:
    data, topology = run.config.data, run.topology
    batches = loader if isinstance(loader.dataset, IterableDataset) else loader.batch_sampler
    size = 1 if batches is None else getattr(batches, "batch_size", None)
    return Deal(
        reader=topology.reader,
        readers=topology.readers,
        batch_size=1 if size is None and batches is loader else size,
        split=data.split_batches,
        even=data.even_batches,
        drop_last=bool(getattr(batches, "drop_last", False)),
    )


def _draw(loader: DataLoader[Any], run: Run) -> Draw:
    data, control = run.config.data, run.collectives("control")
    batches = loader.batch_sampler
    plain = batches is None or type(batches) is BatchSampler
    return Draw(
        items=loader.sampler if batches is None else (batches.sampler if plain else batches),  # type: ignore[attr-defined]
        # Asked for each time: what holds collectives would keep the process group alive beyond the run.
        agree=(lambda tensor: run.collectives("control").broadcast(tensor)) if control.size > 1 else None,
        follows=control.rank > 0,
        seedable=data.use_seedable_sampler,
        data_seed=data.data_seed,
    )


def _placement(run: Run, wanted: bool) -> Callable[[Any], Any] | None:
    """What is done to each batch; None where nothing is."""
    device, move, mark = run.device, run.hooks.move, run.mark_step
    non_blocking = run.config.data.non_blocking
    moves = wanted and device.type != "cpu"
    if mark is None:
        return (lambda batch: move(batch, device, non_blocking)) if moves else None

    def place(batch: Any) -> Any:
        placed = move(batch, device, non_blocking) if moves else batch
        mark("batch")
        return placed

    return place


def _refuse(loader: DataLoader[Any], data: DataLoaderConfiguration, topology: Topology) -> None:
    if data.dispatch_batches:
        raise ConfigError(
            "data.dispatch_batches=True: a process that reads for all others is not there yet; each reads for"
            " itself\nleave data.dispatch_batches unset"
        )
    if data.use_stateful_dataloader:
        raise ConfigError(
            "data.use_stateful_dataloader=True: torchdata's loader is not supported yet; map-style data"
            " resumes exactly without it\nleave data.use_stateful_dataloader unset"
        )
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ConfigError(
            f"this dataloader is sharded already: its DistributedSampler is one of {sampler.num_replicas}"
            " replicas, and prepare shards the data itself\n"
            "give the DataLoader shuffle=True instead of that sampler"
        )
    if not data.split_batches or topology.readers == 1:
        return
    iterable = isinstance(loader.dataset, IterableDataset)
    size = loader.batch_size if iterable else getattr(loader.batch_sampler, "batch_size", None)
    if size is None or size % topology.readers:
        raise ConfigError(
            f"data.split_batches=True splits each batch between {topology.readers} readers, but this"
            f" dataloader's batch size is {size}\n"
            f"make the batch size a multiple of {topology.readers}, or leave split_batches unset"
        )


def _announce(epoch: int, *holders: Any) -> None:
    """Tell datasets and samplers that shuffle by epoch which one begins."""
    seen: list[Any] = []
    for holder in (*holders, *(getattr(holder, "sampler", None) for holder in holders)):
        if hasattr(holder, "set_epoch") and not any(holder is other for other in seen):
            seen.append(holder)
            holder.set_epoch(epoch)


def _remove(active: list[Any], loader: PreparedLoader) -> None:
    for place in reversed(range(len(active))):
        if active[place] is loader:
            del active[place]
            return
