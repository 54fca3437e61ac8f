"""Loaders in real processes: one order for the world, saved in one world and resumed in another."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accel_core import Accelerator, AccelError, CheckpointError, CollectiveError, DataLoaderConfiguration

pytestmark = pytest.mark.needs("accel-ddp")


def shuffled():
    return DataLoader(list(range(21)), batch_size=3, shuffle=True)


def plain_epochs(count):
    torch.manual_seed(5)
    loader = shuffled()
    return [[batch.tolist() for batch in loader] for _ in range(count)]


def flat(epoch):
    return [sample for batch in epoch for sample in batch]


def read(stop_after, folder=None, *, resume=False):
    """What is gathered until `stop_after` rounds (and saved then), or from there on for two epochs."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(shuffled())
    # Ranks seeded differently, as set_seed(device_specific=True) does: the order is rank 0's.
    torch.manual_seed(5 + 100 * accelerator.process_index + 1000 * resume)
    if resume:
        accelerator.load_state(folder)
    gathered = []
    for _ in range(2):
        gathered.append([])
        for number, batch in enumerate(loader, start=1):
            gathered[-1] += accelerator.gather_for_metrics(batch).tolist()
            if number == stop_after:
                accelerator.save_state(folder)
                accelerator.end_training()
                return gathered
    accelerator.end_training()
    return gathered


@pytest.mark.parametrize("world", [1, 2])
def test_the_world_reads_what_one_process_of_plain_pytorch_reads(world, run_processes):
    expected = [flat(epoch) for epoch in plain_epochs(2)]
    assert run_processes(read, None, world=world) == [expected] * world


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (2, 2)])
def test_an_epoch_and_those_after_it_go_on_in_another_world(tmp_path, old, new, run_processes):
    first, second = [flat(epoch) for epoch in plain_epochs(2)]
    before = run_processes(read, 2, str(tmp_path / "saved"), world=old)[0][0]
    for rest, following in run_processes(resumed, str(tmp_path / "saved"), world=new):
        assert (before + rest, following) == (first, second)


def resumed(folder):
    return read(None, folder, resume=True)


def peeked():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(shuffled())
    peek = accelerator.is_main_process
    with pytest.raises(CollectiveError) as found:
        next(iter(loader)) if peek else accelerator.gather(torch.ones(3))
    return str(found.value)


def test_one_rank_that_peeks_at_a_batch_is_named_on_all(run_processes):
    for message in run_processes(peeked, world=2):
        assert "rank 0: the order of the next epoch (dataloader of list)" in message
        assert "rank 1: gather" in message


def loaded(folder):
    """A position of a dataset of 30 samples, loaded for one of 21."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model, loader = torch.nn.Linear(1, 1), accelerator.prepare(DataLoader(list(range(30)), 3))
    accelerator.prepare(model)
    next(iter(loader))
    accelerator.save_state(folder)
    accelerator.end_training()
    accelerator = Accelerator(cpu=True)
    again, loader = torch.nn.Linear(1, 1), accelerator.prepare(shuffled())
    accelerator.prepare(again)
    with pytest.raises(CheckpointError, match="dataloader 0: .* 30 samples or batches, here 21"):
        accelerator.load_state(folder)
    assert not torch.equal(model.weight, again.weight)
    accelerator.load_state(folder, strict=False)
    mine = flat(batch.tolist() for batch in loader)
    accelerator.end_training()
    return torch.equal(model.weight, again.weight) and len(mine) == 12


def test_what_fits_is_loaded_beside_other_data(tmp_path, run_processes):
    assert run_processes(loaded, str(tmp_path / "saved"), world=2) == [True, True]


class Asks(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return Accelerator(cpu=True).process_index


def asked_in_a_worker(context):
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(Asks(), num_workers=1, multiprocessing_context=context)
    with pytest.raises(AccelError, match="make it in the main process"):
        next(iter(loader))
    accelerator.end_training()
    return True


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.by_default
def test_an_accelerator_made_in_a_loaders_worker_is_refused_at_once(context, run_processes):
    assert run_processes(asked_in_a_worker, context, world=2) == [True, True]


def asked_in_a_fork():
    accelerator = Accelerator(cpu=True)
    child = os.fork()
    if not child:
        signal.alarm(30)  # ends it, should it wait for the others
        try:
            Accelerator(cpu=True)
        except AccelError as error:
            os._exit(7 if "make it in the main process" in str(error) else 1)
        os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    accelerator.end_training()
    return status


def test_an_accelerator_made_in_a_fork_is_refused_at_once(run_processes):
    assert run_processes(asked_in_a_fork, world=2) == [7, 7]


class Batched(torch.utils.data.Dataset):
    """A dataset that makes a batch of a list of indices, as those of the datasets library do."""

    def __len__(self):
        return 21

    def __getitem__(self, indices):
        return torch.tensor(indices)


def gathered_of_batch_sampler(kind, drop_last, options):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    torch.manual_seed(5)
    batches = kind(RandomSampler(range(21)), 4, drop_last)
    loader = accelerator.prepare(DataLoader(Batched(), sampler=batches, batch_size=None))
    found = [[accelerator.gather_for_metrics(batch).tolist() for batch in loader] for _ in range(2)]
    accelerator.end_training()
    return [flat(epoch) for epoch in found]


class Whole(torch.utils.data.IterableDataset):
    """Batches of three samples that the dataset makes itself."""

    def __iter__(self):
        yield from torch.arange(21).split(3)


def first_of(samples):
    return samples[0]


def gathered_of_whole_batches(options):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    gathered = {}
    for kind in ("map", "iterable", "batch of one"):
        data = Whole() if kind == "iterable" else torch.arange(21).split(3)
        how = {"batch_size": 1, "collate_fn": first_of} if kind == "batch of one" else {"batch_size": None}
        tensors, objects = [], []
        for batch in accelerator.prepare(DataLoader(data, **how)):
            tensors += accelerator.gather_for_metrics(batch).tolist()
            objects += accelerator.gather_for_metrics([str(each.item()) for each in batch])
        gathered |= {kind: tensors, f"{kind}, as objects": [int(text) for text in objects]}
    accelerator.end_training()
    return gathered


@pytest.mark.parametrize("dispatches", [True, False])
def test_of_batches_that_a_dataset_makes_no_sample_is_lost(dispatches, run_processes):
    for gathered in run_processes(gathered_of_whole_batches, {"dispatch_batches": dispatches}, world=3):
        assert gathered == {kind: list(range(21)) for kind in gathered}


class OwnBatches(BatchSampler):
    """A subclass of the user's own."""


@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"dispatch_batches": True}])
@pytest.mark.parametrize("kind", [BatchSampler, OwnBatches])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.by_default
def test_a_batch_sampler_in_the_place_of_a_sampler_is_shared_by_samples(
    kind, drop_last, options, run_processes
):
    (alone,) = run_processes(gathered_of_batch_sampler, kind, drop_last, {}, world=1)
    assert [len(epoch) for epoch in alone] == [20 if drop_last else 21] * 2
    if drop_last and not options.get("split_batches"):
        alone = [epoch[:16] for epoch in alone]  # rounds of two batches
    assert run_processes(gathered_of_batch_sampler, kind, drop_last, options, world=2) == [alone] * 2
