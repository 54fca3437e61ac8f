"""The plan of a loader: a run's `data` section, applied to a user's loader."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import frozen
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_core.data.dispatch import SOURCE
from accel_core.data.position import Kind
from accel_core.data.sampler import EpochWorker, ShardedSampler, ShareCollate, ShareWorker
from accel_core.data.sharding import Sharding
from accel_core.data.shuffling import MODULUS, Shuffle
from accel_core.data.stateful import ShardedIterable, is_stateful, stateful
from accel_core.distributed.exchange import collective_call
from accel_core.distributed.logging import get_logger
from accel_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from accel_core.contract.config import DataLoaderConfiguration
    from accel_core.contract.data import DataSource
    from accel_core.contract.run import Run
    from accel_core.contract.world import Topology

_logger = get_logger(__name__)

SharedBy = Literal["index", "rank0", "every", "dataset"]
"""What shares out the data: an index that core cuts, the process that reads for all, each reader, which reads
everything and keeps its share, or the data itself."""


@frozen(kw_only=True, eq=False)
class LoaderPlan:
    """The plan by which one of the user's loaders is read.

    Attributes:
        shared_by: what shares out the data.
        reason: the reason for `shared_by`, for people.
        resumes_anywhere: any number of readers can continue from the inner loader's state.
        topology: this reader, of all readers.
        kind: the unit in which its position counts (see `Position`).
        inner: a loader of the user's class, whose order is replaced by the run's.
        shuffle: the source of the order.
        sampler: replaces the loader's (batch) sampler, for map-style data. Never replaced itself: persistent
            workers keep the first one that they got.
        reads: this process reads, for itself or for all.
        seed_workers: returns this rank's seed for the workers of an epoch, given the seed that the rank has
            drawn; None if the drawn seed is used. Collective if several ranks read the same samples.
        synchronized: names of the random streams that are made equal on all ranks when an epoch begins.
        epoch: number in shared memory, for persistent workers that read a dataset with `set_epoch`; else
            None.
    """

    shared_by: SharedBy
    reason: str
    resumes_anywhere: bool
    topology: Topology
    kind: Kind
    inner: DataLoader[Any]
    _sharding: Sharding
    shuffle: Shuffle
    sampler: ShardedSampler | None
    reads: bool
    seed_workers: Callable[[int], int] | None
    synchronized: tuple[str, ...]
    epoch: Tensor | None

    @property
    def sharding(self) -> Sharding:
        """The sharding of rounds, with the padding that `PreparedLoader.padding` has set."""
        return self._sharding if self.sampler is None else self.sampler.sharding

    @property
    def dispatches(self) -> bool:
        """True if one process reads for all."""
        return self.shared_by == "rank0"

    @property
    def meets(self) -> bool:
        """True if readers have to find out whether all of them have a batch."""
        return self.shared_by == "dataset" and self.topology.readers > 1

    @property
    def share(self) -> tuple[int, ...]:
        """(reader, readers) if the data shares itself out, and no other reader can continue; else empty."""
        is_own = self.meets and not self.resumes_anywhere
        return (self.topology.reader, self.topology.readers) if is_own else ()

    @property
    def is_sharded_iterable(self) -> bool:
        """True if the inner loader reads this reader's share of an iterable dataset."""
        return isinstance(self.inner.dataset, ShardedIterable)

    @property
    def persists(self) -> bool:
        """True if workers live on from epoch to epoch."""
        return self.inner.num_workers > 0 and self.inner.persistent_workers

    @property
    def units_per_round(self) -> int:
        """Units of the position per round: samples, batches or rounds, by kind."""
        if self.kind == "indexed":
            return self.sharding.samples or 1
        return 1 if self.kind == "stateful" else self.sharding.batches

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """The generators that the user passed, by role ("loader", "order")."""
        roles = {"loader": self.inner.generator, "order": self.shuffle.generator}
        return {role: given for role, given in roles.items() if isinstance(given, torch.Generator)}

    @property
    def length(self) -> int | None:
        """Number of items of the order per epoch, None if unknown."""
        return None if self.sampler is None else self.shuffle.length

    def adapted(self, name: str, value: Any, *, batches: bool) -> Any:
        """Return an attribute of the user's loader as the inner loader needs it.

        `batches` says whether the user's loader makes batches.
        """
        if self.is_sharded_iterable and name == "collate_fn":
            return ShareCollate(value, single=not batches)
        if self.epoch is not None and name == "worker_init_fn":
            value = EpochWorker(self.epoch, value)
        return ShareWorker(value) if self.is_sharded_iterable and name == "worker_init_fn" else value


def plan_loader(
    loader: DataLoader[Any], run: Run, source: DataSource | None = None, already_sharded: bool | None = None
) -> LoaderPlan:
    """Return the plan by which this rank reads the loader. Call it on all ranks.

    Args:
        loader: the user's loader, or the one that stands for it in `source`.
        run: the run that reads.
        source: what a plugin knows of the loader's library.
        already_sharded: as in `DataLoaderConfiguration`.

    Raises:
        ConfigError: a setting does not work with this loader; the message names the setting.
    """
    data, topology, control = run.config.data, run.topology, run.collectives("control")
    iterable = isinstance(loader.dataset, IterableDataset)
    batches = _batch_sampler(loader)
    is_cut = _cuts(batches)
    _check(loader)
    shared_by, reason = _shared_by(loader, batches, run, source, already_sharded)
    itself, dispatches = shared_by == "dataset", shared_by == "rank0"
    _check_split(loader if iterable else batches, data, topology.readers, itself=itself)
    reader, readers = (0, 1) if itself else (topology.reader, topology.readers)
    sharding = _sharding(loader if iterable else batches, data, reader, readers, iterable=iterable)
    wants_torchdata = data.use_stateful_dataloader and not is_stateful(loader)
    inner = stateful(loader) if wants_torchdata else copy.copy(loader)
    inner.__dict__["_iterator"] = None
    kind, epoch = _kind(inner, batches), _shared_epoch(inner)
    shuffle = Shuffle(
        # A user's own batch sampler makes the order itself: the loader's sampler is not used.
        items=loader.sampler if batches is None else batches.sampler if is_cut else batches,
        # Data that shares itself out has an order per reader, on which only ranks of the same reader agree.
        agree=None
        if dispatches or control.size == (topology.readers if itself else 1)
        else _agreement(run, loader),
        seedable=data.use_seedable_sampler,
        data_seed=data.data_seed,
    )
    sampler = None
    if not iterable:
        sampler = ShardedSampler(
            shuffle=shuffle,
            sharding=sharding,
            batch_size=1 if batches is None else batches.batch_size if is_cut else None,
            single=batches is None,
            everyone=dispatches,
        )
        # Through __dict__: DataLoader.__setattr__ refuses to replace a sampler.
        inner.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = sampler
    elif sharding.readers > 1 or dispatches:
        inner.__dict__.update(_shards(inner, sharding, everyone=dispatches, stateful=kind == "stateful"))
    return LoaderPlan(
        shared_by=shared_by,
        reason=reason,
        resumes_anywhere=source is not None and source.resumes_anywhere,
        topology=topology,
        kind=kind,
        inner=inner,
        sharding=sharding,
        shuffle=shuffle,
        sampler=sampler,
        reads=not dispatches or control.rank == SOURCE,
        seed_workers=None
        if dispatches or control.size == 1
        else _worker_seeds(loader, shuffle, topology, control.size, alike=iterable and not itself),
        # Without "generator": readers agree on the source of the order in any case (`Shuffle`).
        synchronized=tuple(name for name in run.config.rng_types if name != "generator"),
        epoch=epoch,
    )


def _shared_by(
    loader: DataLoader[Any],
    batches: Any,
    run: Run,
    source: DataSource | None,
    already_sharded: bool | None,
) -> tuple[SharedBy, str]:
    """Return what shares out the data, and the reason for people."""
    data, topology = run.config.data, run.topology
    iterable = isinstance(loader.dataset, IterableDataset)
    replicas = _replicas(batches, getattr(batches, "sampler", loader.sampler), topology)
    library = "" if source is None or source.shares_itself is None else source.library
    itself = ""
    if replicas:
        itself = f"{replicas} says num_replicas"
    elif already_sharded:
        itself = "already_sharded"
    elif source is not None and source.shares_itself:
        itself = library
    if itself and data.dispatch_batches:
        raise ConfigError(
            f"data.dispatch_batches=True lets rank 0 read for all, but this dataloader's data shares itself"
            f" out ({itself})\nleave dispatch_batches unset, or give the data undivided"
        )
    if itself:
        return ("dataset", itself) if run.collectives("control").size > 1 else ("index", "one reader")
    if run.collectives("control").size == 1 or data.dispatch_batches is False:
        return ("every", "dispatch_batches is false") if iterable else ("index", "map-style data")
    if not (iterable or data.dispatch_batches):
        return "index", "map-style data"
    if data.dispatch_batches is None and already_sharded is None and not library and topology.readers > 1:
        _logger.warning(
            "the iterable dataset %s is read by rank 0 for all %d readers: if its __iter__ takes a share by"
            " rank, the other shares are lost; then set data.already_sharded to true, else to false",
            type(loader.dataset).__name__,
            topology.readers,
        )
    # Iterable datasets by default: their random order may differ between processes.
    return "rank0", "dispatch_batches" if data.dispatch_batches else "an iterable dataset"


def _replicas(batches: Any, sampler: Any, topology: Topology) -> str:
    """Return the class of the loader's sampler that takes this reader's share; "" if there is none."""
    for each in (batches, sampler):
        replicas = getattr(each, "num_replicas", None) or 1  # torch's word; not all inherit from its class
        if replicas == 1:
            continue
        name, rank = type(each).__name__, getattr(each, "rank", topology.reader)
        if (replicas, rank) != (topology.readers, topology.reader):
            raise ConfigError(
                f"this dataloader's {name} takes share {rank} of num_replicas={replicas}, but this process is"
                f" reader {topology.reader} of {topology.readers}\n"
                f"give {name} num_replicas={topology.readers} and rank={topology.reader}, or give the"
                " DataLoader shuffle=True instead of that sampler"
            )
        return name
    return ""


def _shared_epoch(inner: DataLoader[Any]) -> Tensor | None:
    """Return the epoch number that persistent workers pass to their dataset; None if no dataset needs it."""
    if not (inner.num_workers and inner.persistent_workers and hasattr(inner.dataset, "set_epoch")):
        return None
    epoch: Tensor = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()
    inner.worker_init_fn = EpochWorker(epoch, inner.worker_init_fn)
    return epoch


def _kind(inner: DataLoader[Any], batches: Any) -> Kind:
    """Return the kind of the loader's position, given its sampler of batches."""
    if isinstance(inner.dataset, IterableDataset):
        return "stateful" if is_stateful(inner) else "replay"
    return "indexed" if batches is None or _cuts(batches) else "batches"


def _batch_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler of batches, if any.

    With batch_size=None, a batch sampler may be given as the sampler: then the dataset makes the batches.
    """
    single = loader.batch_sampler is None
    return loader.sampler if single and isinstance(loader.sampler, BatchSampler) else loader.batch_sampler


def _cuts(batches: Any) -> bool:
    """Return whether this is a BatchSampler of torch or torchdata, which cuts an order into batches."""
    made_by = type(batches).__module__.partition(".")[0]
    return isinstance(batches, BatchSampler) and made_by in ("torch", "torchdata")


def _sharding(
    batches: Any, data: DataLoaderConfiguration, reader: int, readers: int, *, iterable: bool
) -> Sharding:
    """Return the sharding of rounds between readers.

    `batches` has the batch size: the sampler of batches, or the loader of an iterable dataset.
    """
    size = 1 if batches is None else getattr(batches, "batch_size", None)
    return Sharding(
        reader=reader,
        readers=readers,
        batch_size=1 if size is None and iterable else size,
        split=data.split_batches,
        even=data.even_batches,
        drop_last=bool(getattr(batches, "drop_last", False)),
    )


def _agreement(run: Run, loader: DataLoader[Any]) -> Any:
    """Return a function that returns the bytes of the world's first rank. Its calls are collective."""
    leads = run.collectives("control").rank == 0  # a bool: the closure must not keep the process group alive
    doing = f"the order of the next epoch (dataloader of {type(loader.dataset).__name__})"

    def agree(state: Tensor) -> Tensor:
        with collective_call(run, "world", doing, None, objects=True) as call:
            agreed: Tensor = call.one_object(state if leads else None, 0)
            return agreed

    return agree


def _worker_seeds(
    loader: DataLoader[Any], shuffle: Shuffle, topology: Topology, ranks: int, *, alike: bool
) -> Callable[[int], int] | None:
    """Return `LoaderPlan.seed_workers` of a loader that several ranks read."""
    if not loader.num_workers:
        return None
    if alike:  # ranks read the whole of an iterable dataset, in the same random order
        return shuffle.agreed
    reader = topology.reader
    is_shared = ranks > topology.readers
    return lambda drawn: ((shuffle.agreed(drawn) if is_shared else drawn) + reader) % MODULUS


def _shards(loader: DataLoader[Any], sharding: Sharding, *, everyone: bool, stateful: bool) -> dict[str, Any]:
    """Return the attributes that give an iterable loader this reader's share."""
    dataset: Any = loader.dataset
    size = loader.batch_size or 1
    return {
        "dataset": ShardedIterable(dataset, sharding, size, everyone=everyone, stateful=stateful),
        "batch_size": None,
        "batch_sampler": None,
        "drop_last": False,
        "collate_fn": ShareCollate(loader.collate_fn, single=loader.batch_size is None),
        "worker_init_fn": ShareWorker(loader.worker_init_fn),
    }


def _check(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose position cannot be known."""
    if skips := getattr(loader, "_batches_to_skip", 0):
        raise ConfigError(
            f"skip_first_batches was called before prepare: this dataloader leaves out {skips} batches of its"
            " own, and a prepared one would leave out as many on each reader, and not know its last batch\n"
            "prepare the DataLoader first, and call skip_first_batches on what prepare returns"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ConfigError(
            "this dataloader has in_order=False: batches that come in any order can neither be counted for a"
            " resume nor told from padding\nleave in_order unset, or use the DataLoader without preparing it"
        )


def _check_split(batches: Any, data: DataLoaderConfiguration, readers: int, *, itself: bool) -> None:
    """Refuse `split_batches` for batches that cannot be split. `batches` has the batch size."""
    if not data.split_batches or readers == 1:
        return
    size = getattr(batches, "batch_size", None)
    if itself:
        raise ConfigError(
            f"data.split_batches=True splits each batch between {readers} readers, but this dataloader's data"
            f" shares itself out: each reader has batches of {size}\n"
            f"leave split_batches unset, and give the DataLoader the batch size of one reader"
        )
    if size is None or size % readers:
        raise ConfigError(
            f"data.split_batches=True splits each batch between {readers} readers, but this"
            f" dataloader's batch size is {size}\n"
            f"make the batch size a multiple of {readers}, or leave split_batches unset"
        )
