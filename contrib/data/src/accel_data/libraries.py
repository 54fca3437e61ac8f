"""The extension `data-libraries`: which loaders of libraries share their data out themselves."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from accel_core import ConfigError, DataSource, hooks, implements
from accel_data.loaders import StandIn, StatefulStandIn, of_batches

if TYPE_CHECKING:
    from accel_core import Run, Topology

__all__ = ["Libraries"]


class Libraries:
    """Recognises loaders of libraries that the program has imported."""

    def __init__(self, config: Any, run: Run) -> None:
        self.run = run

    @implements(hooks.data_source)
    def data_source(self, loader: Any, topology: Topology, already_sharded: bool | None) -> DataSource | None:
        own = isinstance(loader, DataLoader)
        if already_sharded is False or (own and self.run.config.data.dispatch_batches is not None):
            return None if own else _undivided(loader, already_sharded)
        dataset = loader.dataset if own else None
        for library, recognise in (
            ("datasets", self._datasets),
            ("streaming", self._streaming),
            ("litdata", self._litdata),
            ("webdataset", self._webdataset),
        ):
            if library in sys.modules:
                source = recognise(sys.modules[library], loader, dataset, topology)
                if source is not None:
                    return source
        return None if own else _undivided(loader, already_sharded)

    def _datasets(self, library: Any, loader: Any, dataset: Any, topology: Topology) -> DataSource | None:
        if not isinstance(dataset, library.IterableDataset):
            return None
        name = "Hugging Face datasets"
        if (split := getattr(dataset, "_distributed", None)) is not None:  # there is no public name for it
            _check_share(name, (split.rank, split.world_size), topology)
            return DataSource(library=f"{name}, split_dataset_by_node", loader=loader, shares_itself=True)
        # A shuffle without a seed is another one on each process.
        is_ordered = getattr(dataset, "_shuffling", None) is None
        if topology.readers == 1 or dataset.num_shards % topology.readers or not is_ordered:
            return DataSource(library=name, loader=loader, shares_itself=False)
        from datasets.distributed import split_dataset_by_node  # type: ignore[import-untyped]

        part = copy.copy(loader)
        # Through __dict__: DataLoader.__setattr__ refuses to replace a dataset.
        part.__dict__["dataset"] = split_dataset_by_node(dataset, topology.reader, topology.readers)
        shards = f"{name}, {dataset.num_shards} shards for {topology.readers} readers"
        return DataSource(library=shards, loader=part, shares_itself=True)

    def _streaming(self, library: Any, loader: Any, dataset: Any, topology: Topology) -> DataSource | None:
        if not isinstance(dataset, library.StreamingDataset):
            return None
        replication = dataset.replication or 1
        _check_readers("mosaic streaming", self.run.world.size // replication, topology)
        knows = isinstance(loader, library.StreamingDataLoader)
        stand_in = (StatefulStandIn if knows else StandIn)(loader, partial(setattr, dataset, "next_epoch"))
        return DataSource(
            library="mosaic streaming", loader=stand_in, shares_itself=True, resumes_anywhere=knows
        )

    def _litdata(self, library: Any, loader: Any, dataset: Any, topology: Topology) -> DataSource | None:
        if not isinstance(loader, library.StreamingDataLoader):
            return None
        whole = isinstance(dataset, library.StreamingDataset)
        if whole:
            _check_readers("litdata", dataset.distributed_env.world_size, topology)
        stand_in = StatefulStandIn(loader, partial(setattr, loader, "current_epoch"))
        return DataSource(library="litdata", loader=stand_in, shares_itself=True, resumes_anywhere=whole)

    def _webdataset(self, library: Any, loader: Any, dataset: Any, topology: Topology) -> DataSource | None:
        stages = [*_stages(loader), *_stages(dataset)]
        if not stages:
            return None
        stand_in = loader if isinstance(loader, DataLoader) else StandIn(loader)
        splits = any(getattr(stage, "func", stage) is library.split_by_node for stage in stages)
        splits = splits or any(isinstance(stage, library.ResampledShards) for stage in stages)
        if splits:
            _check_readers("webdataset", self.run.world.size, topology)
        elif stand_in is not loader:
            stand_in = of_batches(loader)
        return DataSource(library="webdataset", loader=stand_in, shares_itself=splits)


def _stages(pipeline: Any) -> list[Any]:
    """Return the stages of webdataset's pipeline, with the stages of pipelines and loaders inside it."""
    stages = [*getattr(pipeline, "pipeline", ())]
    for stage in [*stages]:
        stages += _stages(stage.dataset if isinstance(stage, DataLoader) else stage)
    return stages


def _undivided(loader: Any, already_sharded: bool | None) -> DataSource | None:
    """Return the source of a loader of torchdata's nodes, which do not say if they share themselves out."""
    if not already_sharded:
        return DataSource(library="torchdata", loader=of_batches(loader), shares_itself=already_sharded)
    return DataSource(library="torchdata", loader=StatefulStandIn(loader), shares_itself=True)


def _check_readers(library: str, readers: int, topology: Topology) -> None:
    if readers != topology.readers:
        raise ConfigError(
            f"{library} divides this data between {readers} processes, but this run has {topology.readers}"
            " readers\nmake the dataset after the Accelerator, or replicate it over"
            " the ranks of one reader"
        )


def _check_share(library: str, share: tuple[int, int], topology: Topology) -> None:
    if share != (topology.reader, topology.readers):
        raise ConfigError(
            "{}: this dataset is share {} of {},".format(library, *share)
            + f" but this process is reader {topology.reader} of {topology.readers}\n"
            f"write split_dataset_by_node(dataset, rank={topology.reader}, world_size={topology.readers})"
        )
