"""Who shares out the data: index, rank0, every or dataset, in the order that each answer promises."""

from __future__ import annotations

import random
from itertools import chain, islice, zip_longest

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_core import Accelerator, DataLoaderConfiguration

ANSWERS = {
    "index": {},
    "rank0": {"dispatch_batches": True},
    "every": {"dispatch_batches": False},
    "dataset": {"already_sharded": True},
}


class Part(IterableDataset):
    """Every parts-th number from `first` on, divided once more between workers."""

    def __init__(self, length, first=0, parts=1):
        self.length, self.first, self.parts = length, first, parts

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(self.length)[self.first :: self.parts][worker::workers])


def cases(answer, world):
    draw = random.Random(f"{answer} {world}")
    for _ in range(50):
        iterable = answer in ("every", "dataset") or (answer == "rank0" and draw.random() < 0.5)
        workers = draw.choice([0, 0, 0, 0, 0, 1, 2]) if world == 1 else 0  # ranks' workers start slowly
        if iterable and answer != "dataset":  # several workers would each make rounds of their own
            workers = min(workers, 1)
        yield {
            "length": draw.randrange(0, 30),
            "size": draw.randrange(1, 5),
            "drop_last": draw.random() < 0.3,
            "workers": workers,
            "stop": draw.randrange(0, 6),
            "iterable": iterable,
        }


def reference(answer, reader, readers, length, size, drop_last, workers):
    """The batches of one reader."""

    def cut(samples):
        batches = [samples[at : at + size] for at in range(0, len(samples), size)]
        return [batch for batch in batches if not drop_last or len(batch) == size]

    samples = list(range(length))
    if answer == "dataset":
        own = [cut(samples[reader::readers][worker :: max(workers, 1)]) for worker in range(max(workers, 1))]
        return [batch for batch in chain(*zip_longest(*own)) if batch is not None]
    if drop_last:
        samples = samples[: length // (size * readers) * size * readers]
    elif readers > 1 and samples:
        samples += [samples[at % length] for at in range(-length % (size * readers))]
    return cut(samples)[reader::readers]


def made(accelerator, answer, case):
    topology = accelerator.run.topology
    share = (topology.reader, topology.readers) if answer == "dataset" else ()
    data = Part(case["length"], *share) if case["iterable"] else range(case["length"])
    return accelerator.prepare_data_loader(
        DataLoader(
            data,
            batch_size=case["size"],
            drop_last=case["drop_last"],
            num_workers=case["workers"],
            collate_fn=list,
        )
    )


def read(answer, world):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**ANSWERS[answer]))
    found = []
    for case in cases(answer, world):
        loader = made(accelerator, answer, case)
        stop = case["stop"]
        if answer == "dataset":  # a save while some readers have left the loop has no common place
            options = {name: case[name] for name in ("length", "size", "drop_last", "workers")}
            stop = min(stop, *(len(reference(answer, each, world, **options)) for each in range(world)), 99)
        begun = [(batch, loader.last) for batch in islice(loader, stop)]
        resumed = made(accelerator, answer, case)
        resumed.load_state_dict(loader.state_dict())
        is_over = resumed.epoch == 1
        found.append((begun, [] if is_over else [(batch, resumed.last) for batch in resumed]))
        accelerator.free_memory()
    accelerator.end_training()
    return found


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.full), 4])
def test_each_sample_once_in_the_order_that_the_answer_promises(run_processes, answer, world):
    for reader, found in enumerate(run_processes(read, answer, world, world=world)):
        for (begun, rest), case in zip(found, cases(answer, world), strict=True):
            options = {name: case[name] for name in ("length", "size", "drop_last", "workers")}
            batches = reference(answer, reader, world, **options)
            assert [batch for batch, _ in begun + rest] == batches, (reader, case)
            ends = [last for _, last in begun + rest]
            if case["workers"] < 2 or not case["iterable"]:
                assert ends == [False] * (len(batches) - 1) + [True] * bool(batches), (reader, case)
