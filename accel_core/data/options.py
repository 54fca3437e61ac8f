"""What the `data` section of a run means for one of the user's loaders."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from accel_core.data.position import Kind
from accel_core.data.sampler import IndexFeed, ShareCollate, ShareWorker
from accel_core.data.sharding import Deal
from accel_core.data.shuffling import Draw
from accel_core.data.stateful import ShardedIterable, is_stateful, stateful
from accel_core.distributed.exchange import collective_call
from accel_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from accel_core.contract.run import Run

__all__ = [
    "check",
    "cuts",
    "deal_of",
    "dispatches",
    "draw_of",
    "feed_of",
    "inner_of",
    "is_iterable",
    "kind_of",
    "refuse_recut",
    "shards_of",
    "shared",
]


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Whether its dataset has no indices."""
    return isinstance(loader.dataset, IterableDataset)


def cuts(loader: DataLoader[Any]) -> bool:
    """Whether its batches are its sampler, cut: by torch's BatchSampler, or torchdata's copy of that."""
    batches = loader.batch_sampler
    made_by = type(batches).__module__.partition(".")[0]
    return isinstance(batches, BatchSampler) and made_by in ("torch", "torchdata")


def dispatches(loader: DataLoader[Any], run: Run) -> bool:
    """Whether one process reads for all. Iterables by default: each process may read another random one."""
    wanted = run.config.data.dispatch_batches
    return (is_iterable(loader) if wanted is None else wanted) and run.collectives("control").size > 1


def deal_of(loader: DataLoader[Any], run: Run) -> Deal:
    """How its batches are shared out."""
    data, topology = run.config.data, run.topology
    batches = loader if is_iterable(loader) else loader.batch_sampler
    size = 1 if batches is None else getattr(batches, "batch_size", None)
    return Deal(
        reader=topology.reader,
        readers=topology.readers,
        batch_size=1 if size is None and batches is loader else size,
        split=data.split_batches,
        even=data.even_batches,
        drop_last=bool(getattr(batches, "drop_last", False)),
    )


def draw_of(loader: DataLoader[Any], run: Run) -> Draw:
    """What its order is drawn from."""
    data, control = run.config.data, run.collectives("control")
    control_rank = control.rank  # not `control`: it would keep the process group alive beyond the run
    agrees = control.size > 1 and not dispatches(loader, run)
    doing = f"the order of the next epoch (dataloader of {type(loader.dataset).__name__})"

    def agree(mine: Tensor) -> Tensor:
        with collective_call(run, "world", doing, None, objects=True) as call:
            return call.one_payload(mine if control_rank == 0 else None, 0).clone()

    return Draw(
        items=_items(loader),
        agree=agree if agrees else None,
        follows=control_rank > 0,
        seedable=data.use_seedable_sampler,
        data_seed=data.data_seed,
    )


def _items(loader: DataLoader[Any]) -> Any:
    # Of a batch sampler that the user made, `loader.sampler` knows nothing.
    if loader.batch_sampler is None:
        return loader.sampler
    return loader.batch_sampler.sampler if cuts(loader) else loader.batch_sampler  # type: ignore[attr-defined]


def refuse_recut(loader: DataLoader[Any], draw: Draw, deal: Deal) -> None:
    """Refuse a batch sampler that was changed after `prepare`, which has taken over what it said then."""
    if loader.batch_sampler is None or not cuts(loader):
        return
    then = {"batch_size": deal.batch_size, "drop_last": deal.drop_last, "sampler": draw.items}
    for name, value in then.items():
        now = getattr(loader.batch_sampler, name)
        if now is not value and (name == "sampler" or now != value):
            raise ConfigError(
                f"the {name} of this dataloader's batch sampler was {value!r} when it was prepared, and is"
                f" {now!r} now: that has no effect\n"
                f"set {name} before prepare, or prepare a DataLoader that has the new one"
            )


def feed_of(loader: DataLoader[Any], draw: Draw, deal: Deal, everyone: bool) -> IndexFeed:
    """What takes the place of its (batch) sampler; `everyone`: this process reads for all."""
    single = loader.batch_sampler is None
    size = loader.batch_sampler.batch_size if cuts(loader) else None  # type: ignore[union-attr]
    return IndexFeed(draw=draw, deal=deal, batch_size=1 if single else size, single=single, everyone=everyone)


def shards_of(loader: DataLoader[Any], deal: Deal, everyone: bool, stateful: bool) -> dict[str, Any]:
    """The attributes with which a loader of an iterable dataset gives this reader's share."""
    dataset: Any = loader.dataset
    return {
        "dataset": ShardedIterable(
            dataset, deal, loader.batch_size or 1, everyone=everyone, stateful=stateful
        ),
        "batch_size": None,
        "batch_sampler": None,
        "drop_last": False,
        "collate_fn": ShareCollate(loader.collate_fn, single=loader.batch_size is None),
        "worker_init_fn": ShareWorker(loader.worker_init_fn),
    }


def shared(loader: DataLoader[Any], name: str, value: Any) -> Any:
    """An attribute of the user's loader, as the one that gives shares of an iterable dataset has it."""
    if name == "collate_fn":
        return ShareCollate(value, single=loader.batch_size is None)
    return ShareWorker(value) if name == "worker_init_fn" else value


def inner_of(loader: DataLoader[Any], run: Run) -> DataLoader[Any]:
    """A loader like it, to be changed; torchdata's, if that is wanted.

    Raises:
        ConfigError: torchdata's cannot be had.
    """
    wanted = run.config.data.use_stateful_dataloader and not is_stateful(loader)
    return stateful(loader) if wanted else copy.copy(loader)


def kind_of(loader: DataLoader[Any], inner: DataLoader[Any]) -> Kind:
    """How its position is told; `inner`: what `inner_of` made of it."""
    if is_stateful(inner):
        return "stateful"
    if is_iterable(loader):
        return "replay"
    return "indexed" if loader.batch_sampler is None or cuts(loader) else "batches"


def check(loader: DataLoader[Any], run: Run) -> None:
    """Raises ConfigError: the settings cannot be had for this loader; the message names the setting."""
    data, readers = run.config.data, run.topology.readers
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ConfigError(
            f"this dataloader is sharded already: its DistributedSampler is one of {sampler.num_replicas}"
            " replicas, and prepare shards the data itself\n"
            "give the DataLoader shuffle=True instead of that sampler"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ConfigError(
            "this dataloader has in_order=False: batches that come in any order can neither be counted for a"
            " resume nor told from padding\nleave in_order unset, or use the DataLoader without preparing it"
        )
    if dispatches(loader, run) and is_iterable(loader) and loader.num_workers > 1 and not data.even_batches:
        raise ConfigError(
            "data.even_batches=False: several workers each read this iterable dataset for all processes, and"
            " none knows which batch is a process's last\n"
            "give the DataLoader one worker, or set data.even_batches or data.dispatch_batches=False"
        )
    if not data.split_batches or readers == 1:
        return
    size = loader.batch_size if is_iterable(loader) else getattr(loader.batch_sampler, "batch_size", None)
    if size is None or size % readers:
        raise ConfigError(
            f"data.split_batches=True splits each batch between {readers} readers, but this"
            f" dataloader's batch size is {size}\n"
            f"make the batch size a multiple of {readers}, or leave split_batches unset"
        )
