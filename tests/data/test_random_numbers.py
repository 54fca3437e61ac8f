"""docs/data.md, "Random numbers": what is equal on all processes, and what each draws for itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

from accel_core import Accelerator, set_seed

pytestmark = pytest.mark.needs("accel-ddp")


class Augmented(Dataset):
    """(index, a number that is drawn as it is read)."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index, torch.rand(())


def recipe(workers, seeds_twice=True):
    """Split, weights, order, what was drawn for each sample, and the units that dropout kept."""
    accelerator = Accelerator(cpu=True, strategy="ddp")
    set_seed(0)
    train, _ = random_split(Augmented(), [16, 8])
    layer, dropout = nn.Linear(8, 1), nn.Dropout(0.5)
    weights, split = layer.weight.tolist(), list(train.indices)
    loader, _ = accelerator.prepare(
        DataLoader(train, 2, shuffle=True, num_workers=workers), nn.Sequential(dropout, layer)
    )
    if seeds_twice:
        set_seed(0, device_specific=True)
    batches = [*loader]
    order = [index for indices, _ in batches for index in indices.tolist()]
    drawn = {number for _, numbers in batches for number in numbers.tolist()}
    kept = dropout(torch.ones(64)).tolist()
    accelerator.end_training()
    return {"split": split, "weights": weights, "order": order, "drawn": drawn, "kept": kept}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("world", [2, 3])
def test_dropout_and_augmentation_differ_where_the_script_seeds_twice(world, workers, run_processes):
    ranks = run_processes(recipe, workers, world=world)

    for name in ("split", "weights"):
        assert all(rank[name] == ranks[0][name] for rank in ranks)
    read = {index for rank in ranks for index in rank["order"]}
    assert read == {*ranks[0]["split"]}  # one order is shared out: nothing is left out
    assert len({tuple(rank["kept"]) for rank in ranks}) == world
    assert len(set.union(*(rank["drawn"] for rank in ranks))) == sum(len(rank["drawn"]) for rank in ranks)


def test_workers_differ_by_themselves_and_dropout_does_not(run_processes):
    one, other = run_processes(recipe, 1, False, world=2)

    assert not one["drawn"] & other["drawn"]
    assert one["kept"] == other["kept"]
