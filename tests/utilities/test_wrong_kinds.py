"""Numbers of any library are numbers; seeds and log levels say what is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accel_core import (
    Accelerator,
    ConfigError,
    get_logger,
    set_seed,
    skip_first_batches,
)


@pytest.fixture
def trained():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    yield accelerator, model
    accelerator.end_training()


@pytest.mark.parametrize(
    "number", [np.int64(2), np.array(2), torch.tensor(2)], ids=["numpy", "array", "torch"]
)
def test_a_whole_number_may_be_of_any_library(trained, number):
    accelerator, _ = trained
    accelerator.gradient_accumulation_steps = number
    assert type(accelerator.gradient_accumulation_steps) is int
    accelerator.gradient_accumulation_steps = 1
    assert len(list(skip_first_batches(accelerator.prepare(DataLoader([1, 2, 3])), number))) == 1
    set_seed(number)


@pytest.mark.parametrize("number", [np.float32(2), torch.tensor(2.0)], ids=["numpy", "torch"])
def test_a_result_is_scaled_by_a_number_of_any_library(trained, number):
    assert trained[0].reduce(torch.ones(2), scale=number).tolist() == [2.0, 2.0]


def test_a_window_has_a_micro_batch(trained):
    with pytest.raises(ConfigError, match="is 0\nset it to 1 or more"):
        trained[0].gradient_accumulation_steps = 0


def test_a_logger_has_a_level_that_there_is():
    with pytest.raises(TypeError, match="3.5"):
        get_logger("name", 3.5)
