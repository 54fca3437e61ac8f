"""What each rank of test_save_model_ranks does. Returns plain values, which the test compares."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from accel_core import Accelerator
from accel_core.errors import CheckpointError


def _prepared():
    torch.manual_seed(0)
    accelerator = Accelerator(device="cpu")
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    return accelerator, accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


def _gather_rows(accelerator):
    """Give each weight as a strategy does that shards: put together from a part of each rank."""
    (unit,) = accelerator.run.units
    own, read = unit.hooks.iter_weights, []

    def iter_weights(unit, dtype, to):
        for name, tensor in own(unit, dtype, to):
            read.append(name)
            share = tensor.chunk(accelerator.num_processes)[accelerator.process_index]
            yield name, accelerator.gather(share)

    unit.hooks.iter_weights = iter_weights
    return read


def save_it(folder):
    accelerator, model = _prepared()
    read = _gather_rows(accelerator)
    accelerator.save_model(model, folder)
    names = list(accelerator.get_state_dict(model))
    accelerator.end_training()
    return type(model).__name__, names, read


def fail_on_the_first_rank(folder):
    accelerator, model = _prepared()
    read = _gather_rows(accelerator)
    file = Path(folder) / "file"
    if accelerator.is_main_process:
        file.touch()
    try:
        accelerator.save_model(model, file)
    except (CheckpointError, OSError) as error:
        return str(error), len(read)
    return "", 0


def read_it(sharded):
    """What each rank gets of a model whose ranks hold parts of weights, or whole ones."""
    accelerator, model = _prepared()
    if sharded:
        _gather_rows(accelerator)
        (unit,), cards = accelerator.run.units, accelerator.run.cards
        card = cards[unit.strategy]
        cards[unit.strategy] = card._replace(offers=card.offers - {"whole_weights"})
    found, all_of_it = (accelerator.get_state_dict(model, rank0_only=only) for only in (True, False))
    said = ""
    try:
        found["0.weight"]
    except KeyError as error:
        said = str(error)
    same = all(torch.equal(tensor, all_of_it[name]) for name, tensor in found.items())
    accelerator.end_training()
    return [*found], [*all_of_it], same, repr(found) if not found else "", said
