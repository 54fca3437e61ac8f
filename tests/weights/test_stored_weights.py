"""The weights of a checkpoint, read one by one without a run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator, CheckpointError, stored_weights


@pytest.fixture
def accelerator():
    made = Accelerator(cpu=True)
    yield made
    made.end_training()


def test_each_weight_comes_once_with_all_its_names_and_where_it_lies(accelerator, tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    expected = accelerator.prepare(model).state_dict()
    accelerator.save_state(tmp_path / "ck")

    found = list(stored_weights(tmp_path / "ck"))
    assert sorted(name for names, _ in found for name in names) == sorted(expected)
    assert ["0.weight", "2.weight"] in [sorted(names) for names, _ in found]
    for names, stored in found:
        weight = expected[names[0]]
        assert (stored.shape, stored.dtype) == (tuple(weight.shape), str(weight.dtype).removeprefix("torch."))
        assert torch.equal(stored.tensor(), weight)
        file, start = stored.place
        assert file.read_bytes()[start : start + weight.nbytes] == weight.numpy().tobytes()


@pytest.mark.parametrize("together", [True, False])
def test_a_checkpoint_of_several_models_is_refused_with_their_number(accelerator, tmp_path, together):
    models = nn.Linear(1, 1), nn.Linear(1, 1)
    if together:
        optimizer = torch.optim.SGD([weight for model in models for weight in model.parameters()])
        accelerator.prepare(*models, optimizer)
    else:
        for model in models:
            accelerator.prepare(model)
    accelerator.save_state(tmp_path / "ck")

    with pytest.raises(CheckpointError, match="ck has 2 models, of units unit0.*one was asked for"):
        next(stored_weights(tmp_path / "ck"))
