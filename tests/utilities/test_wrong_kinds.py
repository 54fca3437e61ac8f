"""Arguments of a wrong kind: a sentence that says what to give, and not an error from within."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accel_core import (
    Accelerator,
    AccelError,
    ConfigError,
    LocalSGD,
    find_executable_batch_size,
    get_logger,
    notebook_launcher,
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


class NumbersFlag:
    """np.True_ of numpy 1, which counts as the number 1."""

    dtype = np.dtype(bool)

    def __index__(self):
        return 1

    def __repr__(self):
        return "True"


FLAGS = {"bool": True, "torch": torch.tensor(True), "numpy": np.True_, "numpy 1": NumbersFlag()}


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_a_flag_of_any_library_is_no_number(flag):
    with pytest.raises(ConfigError, match="set_seed: the seed is .*True"):
        set_seed(flag)


def test_a_flag_is_no_number(trained):
    accelerator, model = trained
    loader = accelerator.prepare(DataLoader([1, 2, 3]))
    for call in (
        lambda: setattr(accelerator, "gradient_accumulation_steps", True),
        lambda: accelerator.forward_backward(model, [torch.ones(1, 2)], loss_of, microbatches=True),
        lambda: accelerator.on_process(print, process_index=True),
        lambda: find_executable_batch_size(print, starting_batch_size=True),
        lambda: skip_first_batches(loader, True),
        lambda: LocalSGD(accelerator, model, True),
        lambda: set_seed(True),
        lambda: accelerator.log({"loss": 1.0}, step=True),
    ):
        with pytest.raises(AccelError, match=r"True.*\n"):
            call()
    for collective in (
        lambda: accelerator.broadcast(torch.ones(2), from_process=True),
        lambda: accelerator.pad_across_processes(torch.ones(2, 2), dim=True),
    ):
        with pytest.raises((TypeError, ValueError), match=r"True.*\ngive"):
            collective()


@pytest.mark.parametrize(
    "number", [np.int64(2), np.array(2), torch.tensor(2)], ids=["numpy", "array", "torch"]
)
def test_a_whole_number_may_be_of_any_library(trained, number):
    accelerator, model = trained
    accelerator.gradient_accumulation_steps = number
    assert type(accelerator.gradient_accumulation_steps) is int
    accelerator.gradient_accumulation_steps = 1
    assert len(list(skip_first_batches(accelerator.prepare(DataLoader([1, 2, 3])), number))) == 1
    assert find_executable_batch_size(type, starting_batch_size=number)() is int
    assert accelerator.pad_across_processes(torch.ones(2, 2, 2), dim=number).shape == (2, 2, 2)
    LocalSGD(accelerator, model, number)
    set_seed(number)


def test_a_number_that_numpy_has_masked_is_none(trained):
    accelerator, _ = trained
    with pytest.raises(AccelError, match="micro-batches"):
        accelerator.gradient_accumulation_steps = np.ma.array(2, mask=True)


@pytest.mark.parametrize(
    "number", [np.float32(2), np.array(2.0), torch.tensor(2.0)], ids=["numpy", "array", "torch"]
)
def test_a_result_is_scaled_by_a_number_of_any_library(trained, number):
    assert trained[0].reduce(torch.ones(2), scale=number).tolist() == [2.0, 2.0]


def loss_of(model, batch):
    return model(batch).sum(), None


@pytest.mark.parametrize(
    ("batches", "function", "options", "said"),
    [
        (None, loss_of, {}, "batches is None"),
        ([torch.ones(1, 2)], None, {}, "forward_loss is None"),
        ([torch.ones(1, 2)], loss_of, {"microbatches": "1"}, "microbatches is '1'"),
        ([torch.ones(1, 2)], loss_of, {"microbatches": 1.5}, "microbatches is 1.5"),
    ],
)
def test_a_window_has_batches_a_function_and_a_number(trained, batches, function, options, said):
    accelerator, model = trained
    with pytest.raises(AccelError, match=rf"forward_backward: {said}.*\n(give|leave)"):
        accelerator.forward_backward(model, batches, function, **options)


def test_a_loss_is_one_number_unless_gradients_are_given(trained):
    accelerator, model = trained
    with pytest.raises(AccelError, match=r"shape \(3, 2\).*\ngive one number, such as loss.mean"):
        accelerator.backward(model(torch.ones(3, 2)))
    accelerator.backward(model(torch.ones(3, 2)), gradient=torch.ones(3, 2))
    accelerator.backward(model(torch.ones(3, 2)).sum().reshape(1))


@pytest.mark.parametrize(
    "call",
    [
        lambda it: it.reduce(torch.ones(2), scale=None),
        lambda it: it.reduce(torch.ones(2), scale="2"),
        lambda it: it.reduce(torch.ones(2), scale=torch.ones(2)),
        lambda it: it.reduce(torch.ones(2), scale=np.ones(2)),
        lambda it: it.reduce(torch.ones(2), scale=np.ma.masked),
        lambda it: it.broadcast(torch.ones(2), from_process=None),
        lambda it: it.pad_across_processes(torch.ones(2), dim="0"),
        lambda it: it.pad_across_processes(torch.ones(2), pad_index=None),
    ],
)
def test_arguments_of_collectives_are_numbers(trained, call):
    with pytest.raises((TypeError, ValueError), match="\ngive"):
        call(trained[0])


@pytest.mark.parametrize("seed", [2**70, -(2**70), 2**64])
def test_a_seed_has_64_bits(seed):
    with pytest.raises(ConfigError, match="set_seed: the seed is .*\ngive"):
        set_seed(seed)


def test_a_logger_has_a_name_and_a_level():
    with pytest.raises(ConfigError, match="get_logger: the name is 3\ngive text"):
        get_logger(3)
    with pytest.raises(ConfigError, match="there is no level 3.5"):
        get_logger("name", 3.5)


def test_local_sgd_is_of_an_accelerator(trained):
    with pytest.raises(ConfigError, match="LocalSGD was given None.*\ngive"):
        LocalSGD(None, trained[1], 2)


@pytest.mark.parametrize("args", [5, None, "abc"])
def test_arguments_of_a_launched_function_are_a_tuple(args):
    with pytest.raises(ConfigError, match="notebook_launcher: args is .*\ngive a tuple"):
        notebook_launcher(print, args)


def test_what_is_launched_is_a_function():
    with pytest.raises(ConfigError, match="notebook_launcher: None cannot be called\ngive"):
        notebook_launcher(None)
