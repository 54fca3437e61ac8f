"""Programs of the tests: each library's loader over 24 numbers, read, saved and resumed."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from accel_core import Accelerator, CheckpointError, ConfigError

LENGTH = 24


def write(folder: Path, library: str) -> None:
    """Write the library's files."""
    folder.mkdir(parents=True, exist_ok=True)
    if library == "mosaic":
        stand_in_for_torchvision()
        from streaming import MDSWriter

        with MDSWriter(out=str(folder), columns={"x": "int"}, size_limit=200) as out:
            for number in range(LENGTH):
                out.write({"x": number})
    elif library == "litdata":
        import litdata

        litdata.optimize(
            fn=int, inputs=list(range(LENGTH)), output_dir=str(folder), chunk_size=4, num_workers=1
        )
    elif library.startswith("webdataset"):
        import webdataset

        for shard in range(6):
            with webdataset.TarWriter(str(folder / f"{shard}.tar")) as out:
                for number in range(4 * shard, 4 * shard + 4):
                    out.write({"__key__": f"{number:03}", "x.cls": number})


def stand_in_for_torchvision() -> None:
    """mosaic imports torchvision for its datasets of images; its wheels do not fit every build of torch."""

    class Anything(types.ModuleType):
        __path__: tuple[str, ...] = ()

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("", ".datasets", ".transforms", ".transforms.functional"):
        module = Anything(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules.setdefault(module.__name__, module)


def numbers(shards):
    yield from (number for shard in shards for number in range(4 * shard, 4 * shard + 4))


def examples(shards):
    for number in numbers(shards):
        yield {"x": number}


def loader_of(library: str, folder: Path, workers: int, accelerator: Accelerator):
    """The library's loader in batches of 2."""
    if library.startswith("datasets"):
        from datasets import IterableDataset
        from datasets.distributed import split_dataset_by_node

        data = IterableDataset.from_generator(examples, gen_kwargs={"shards": list(range(6))})
        if library == "datasets split":
            data = split_dataset_by_node(data, accelerator.process_index, accelerator.num_processes)
        return DataLoader(data, batch_size=2, num_workers=workers)
    if library == "mosaic":
        stand_in_for_torchvision()
        from streaming import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(local=str(folder), shuffle=True, batch_size=2, num_canonical_nodes=1)
        return StreamingDataLoader(data, batch_size=2, num_workers=workers)
    if library == "litdata":
        import litdata

        return litdata.StreamingDataLoader(
            litdata.StreamingDataset(str(folder)), batch_size=2, num_workers=workers
        )
    if library.startswith("webdataset"):
        import webdataset

        data = webdataset.WebDataset(
            [str(folder / f"{shard}.tar") for shard in range(6)],
            nodesplitter=webdataset.split_by_node,
            shardshuffle=False,
        )
        data = data.decode().to_tuple("x.cls")
        if library == "webdataset WebLoader":
            return webdataset.WebLoader(data.batched(2), batch_size=None, num_workers=workers)
        return DataLoader(data, batch_size=2, num_workers=workers)
    from torchdata.nodes import Batcher, IterableWrapper, Loader

    rank, world = accelerator.process_index, accelerator.num_processes
    return Loader(Batcher(IterableWrapper(range(LENGTH)[rank::world]), batch_size=2))


def samples(batch) -> list[int]:
    if isinstance(batch, dict):
        batch = batch["x"]
    return (
        torch.as_tensor(batch[0] if isinstance(batch, (list, tuple)) and torch.is_tensor(batch[0]) else batch)
        .flatten()
        .tolist()
    )


def prepared(library, folder, workers):
    accelerator = Accelerator(cpu=True)
    loader = loader_of(library, Path(folder), workers, accelerator)
    sharded = True if library == "nodes" else None
    return accelerator, accelerator.prepare_data_loader(loader, already_sharded=sharded)


def whole(library, folder, workers=0):
    accelerator, loader = prepared(library, folder, workers)
    epochs = [[number for batch in loader for number in samples(batch)] for _ in range(2)]
    text = accelerator.explain()
    accelerator.end_training()
    return epochs, text


def saved(library, folder, workers=0):
    accelerator, loader = prepared(library, folder, workers)
    seen = []
    for number, batch in enumerate(loader, start=1):
        seen += samples(batch)
        if number == 3:
            accelerator.save_state(f"{folder}/saved")
            break
    accelerator.end_training()
    return seen


def resumed(library, folder, workers=0):
    try:
        accelerator, loader = prepared(library, folder, workers)
        accelerator.load_state(f"{folder}/saved")
    except (CheckpointError, ConfigError) as error:
        return str(error)
    seen = [number for batch in loader for number in samples(batch)]
    accelerator.end_training()
    return seen
