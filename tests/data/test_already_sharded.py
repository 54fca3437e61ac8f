"""Data that shares itself out: taken as it is, with a position per reader, and with ends that differ."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from accel_core import Accelerator, AccelError, CheckpointError, ConfigError, DataLoaderConfiguration

pytestmark = pytest.mark.needs("accel-ddp")


class Share(IterableDataset):
    """lengths[rank] samples: 100 * rank, 100 * rank + 1, ..."""

    def __init__(self, rank, lengths):
        self.rank, self.length = rank, lengths[rank]

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(100 * self.rank, 100 * self.rank + self.length)[worker::workers])


def floats(samples):
    return torch.tensor(samples, dtype=torch.float)


def stream(accelerator, lengths=(8, 8, 8), **options):
    data = Share(accelerator.process_index, lengths)
    loader = DataLoader(data, batch_size=2, collate_fn=floats, **options)
    return accelerator.prepare_data_loader(loader, already_sharded=True)


def sampled():
    accelerator = Accelerator(cpu=True)
    sampler = DistributedSampler(range(12), shuffle=True, seed=3)
    loader = accelerator.prepare(DataLoader(range(12), 2, sampler=sampler, collate_fn=list))
    epochs = [list(loader) for _ in range(2)]
    wanted = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        wanted.append(list(DataLoader(range(12), 2, sampler=sampler, collate_fn=list)))
    text = accelerator.explain()
    accelerator.end_training()
    return epochs == wanted, epochs, text


def test_a_distributed_sampler_is_taken_as_it_is_with_its_epochs(run_processes):
    results = run_processes(sampled)
    assert all(same for same, _, _ in results)
    for epoch in range(2):
        assert sorted(n for _, epochs, _ in results for batch in epochs[epoch] for n in batch) == list(
            range(12)
        )
    assert "shared by dataset: the data shares itself out (DistributedSampler" in results[0][2]


def counted(lengths):
    accelerator = Accelerator(cpu=True)
    loader = stream(accelerator, lengths)
    samples = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    accelerator.end_training()
    return sorted(chain(*samples))


def test_metrics_see_each_sample_of_each_share_once(run_processes):
    assert run_processes(counted, (6, 6)) == [[0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104, 105]] * 2


def test_metrics_of_a_batch_that_others_do_not_have_are_refused_by_name(run_processes):
    with pytest.raises(Exception, match=r"gather_for_metrics.*batch 3 of epoch 0"):
        run_processes(counted, (6, 4))


def trained(lengths, joined, size=1):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=size)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    loader, steps, lasts = stream(accelerator, lengths), 0, []

    def train():
        nonlocal steps
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[:, None]).sum())
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            lasts.append(loader.last)

    try:
        if joined:
            with accelerator.join_uneven_inputs([model]):
                train()
        else:
            train()
    except AccelError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return steps, lasts


@pytest.mark.parametrize("lengths", [(8, 4), (2, 6), (0, 4)])
def test_shares_that_end_apart_are_trained_on_inside_join(run_processes, lengths):
    results = run_processes(trained, lengths, True)
    for (steps, lasts), length in zip(results, lengths, strict=True):
        assert steps == length // 2
        assert lasts == [False] * (steps - 1) + [True] * bool(steps)


def test_a_batch_that_others_do_not_have_is_refused_outside_join(run_processes):
    failed, (steps, _) = run_processes(trained, (8, 4), False)
    assert "in batch 3 of epoch 0" in failed
    assert "the data shares itself out" in failed
    assert steps == 2


def interrupted(folder, options):
    accelerator = Accelerator(cpu=True)
    loader = stream(accelerator, **options)
    seen = []
    for batch in loader:
        seen += batch.tolist()
        if len(seen) == 4:
            accelerator.save_state(folder)
            break
    accelerator.end_training()
    return seen


def resumed(folder, options):
    accelerator = Accelerator(cpu=True)
    loader = stream(accelerator, **options)
    try:
        accelerator.load_state(folder)
    except CheckpointError as error:
        return str(error)
    finally:
        seen = [] if accelerator.num_processes != 2 else [*chain(*(batch.tolist() for batch in loader))]
        accelerator.end_training()
    return seen


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["none", "workers", "persistent"],
)
def test_the_same_world_resumes_with_the_next_sample_of_each_share(run_processes, tmp_path, options):
    before = run_processes(interrupted, tmp_path / "saved", options)
    after = run_processes(resumed, tmp_path / "saved", options)
    for rank in range(2):
        assert sorted(before[rank] + after[rank]) == list(range(100 * rank, 100 * rank + 8))


@pytest.mark.parametrize("world", [1, 3])
def test_another_world_is_refused_by_name(run_processes, tmp_path, world):
    run_processes(interrupted, tmp_path / "saved", {})
    for text in run_processes(resumed, tmp_path / "saved", {}, world=world):
        assert "share 0 of 2, which the data makes itself" in text


def refused(options):
    with pytest.raises(ConfigError) as caught:
        stream(Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options)))
    return str(caught.value)


@pytest.mark.parametrize("option", ["dispatch_batches", "split_batches"])
def test_settings_that_contradict_it_are_refused_by_name(run_processes, option):
    assert all(f"data.{option}=True" in text for text in run_processes(refused, {option: True}))


def guessed(told):
    import logging

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("accel_core.data.options").addHandler(handler)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(already_sharded=told))
    accelerator.prepare(DataLoader(Share(accelerator.process_index, (4, 4)), 2))
    accelerator.end_training()
    return records


def test_an_iterable_that_nobody_recognises_is_one_warning(run_processes):
    (text,), *_ = run_processes(guessed, None)
    assert "Share is read by rank 0 for all 2 readers" in text
    assert "data.already_sharded" in text
    assert run_processes(guessed, False) == [[], []]


def compared():
    import logging

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("accel_core.data.loader").addHandler(handler)
    accelerator = Accelerator(cpu=True)
    list(accelerator.prepare_data_loader(DataLoader(range(4), 2), already_sharded=True))
    accelerator.end_training()
    return records


def test_equal_first_batches_are_a_warning_in_debug_mode(run_processes):
    (text,), *_ = run_processes(compared, environment={"ACCEL_DEBUG": "1"})
    assert "all 2 readers have the same first batch" in text
