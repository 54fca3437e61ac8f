"""Inside a window a mean is divided by the window's size: its gradients are the division's, to the bit."""

from __future__ import annotations

from functools import wraps
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from accel_core import Accelerator
from accel_core.errors import AccelError
from accel_core.training.step import torchs_own

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Own(Tensor):
    """A tensor of a class of its own, that notes the last loss of a backward."""

    divided = 0.0

    def backward(self, *args, **kwargs):
        Own.divided = self.item()
        super().backward(*args, **kwargs)


@pytest.fixture
def half(accelerator_of):
    """An accelerator inside a window of two micro-batches, and its model of one weight, 3."""
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    model = accelerator.prepare(model)
    with accelerator.accumulate(model):
        yield accelerator, model


def around(plain):
    def call(self, **given):
        return plain(self, **given)

    return call


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.full((1, 1), 5.0)).sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=50)
@given(size=st.integers(2, 5000), value=st.floats(0.1, 100.0))
def test_the_gradient_of_any_size_and_dtype_is_that_of_the_division(dtype, size, value):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=size)
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    expected = nn.Parameter(model.weight.detach().clone())
    inputs = torch.full((1, 1), value, dtype=dtype)
    (nn.functional.linear(inputs, expected).mean() / size).backward()
    model = accelerator.prepare(model)

    with accelerator.accumulate(model):
        accelerator.backward(model(inputs).mean())

    assert model.weight.grad.equal(expected.grad)
    accelerator.end_training()


def test_a_hook_of_the_loss_sees_its_share(half):
    accelerator, model = half
    loss, seen = loss_of(model), []
    loss.register_hook(seen.append)

    accelerator.backward(loss)

    assert seen == [torch.tensor(0.5)]


def test_what_a_hook_writes_into_a_gradient_stays_in_its_backward(half):
    accelerator, model = half
    for _ in range(2):
        loss = loss_of(model)
        loss.register_hook(lambda gradient: gradient.mul_(10))  # torch advises against it

        accelerator.backward(loss)

    assert model.weight.grad.item() == 2 * 10 * 5 / 2


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_number_may_have_dimensions(half, shape):
    accelerator, model = half

    accelerator.backward(loss_of(model).reshape(shape))

    assert model.weight.grad.item() == 5 / 2


@pytest.mark.parametrize(
    "made", [lambda loss: loss.repeat(2), lambda loss: loss * 1j], ids=["two", "complex"]
)
def test_a_loss_that_is_not_one_real_number_is_refused(half, made):
    accelerator, model = half

    with pytest.raises((AccelError, RuntimeError), match=r"gradients are of one number|real scalar outputs"):
        accelerator.backward(made(loss_of(model)))

    assert model.weight.grad is None


def test_options_reach_torch(half):
    accelerator, model = half
    loss = loss_of(model)

    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss, gradient=torch.tensor(4.0))

    assert model.weight.grad.item() == 5 / 2 + 4 * 5 / 2


def test_a_tensor_of_another_class_is_divided_by_its_own_means(half):
    accelerator, model = half

    accelerator.backward(loss_of(model).as_subclass(Own))

    assert Own.divided == 15 / 2
    assert model.weight.grad.item() == 5 / 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_loss_of_one_number_is_divided(half):
    accelerator, model = half
    nested = torch.nested.as_nested_tensor([loss_of(model).reshape(1)])

    accelerator.backward(nested)

    assert model.weight.grad.item() == 5 / 2


def test_a_loss_whose_backward_a_program_has_replaced_is_divided(half):
    accelerator, model = half
    loss = loss_of(model)
    loss.backward = lambda: None

    accelerator.backward(loss)

    assert model.weight.grad.item() == 5 / 2


def test_a_backward_that_a_program_has_put_into_torchs_class_sees_the_divided_loss(half, monkeypatch):
    accelerator, model = half
    plain, seen = Tensor.backward, []
    monkeypatch.setattr(
        Tensor, "backward", lambda self, **given: (seen.append(self.item()), plain(self, **given))
    )

    accelerator.backward(loss_of(model))

    assert seen == [15 / 2]
    assert model.weight.grad.item() == 5 / 2


def test_a_parameters_backward_under_no_grad_says_why(half):
    accelerator, model = half

    with torch.no_grad(), pytest.raises(AccelError, match="does not require a gradient"):
        accelerator.backward(model.weight)


def test_what_is_no_loss_leaves_a_clearing_that_was_put_off(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = nn.Linear(1, 1, bias=False), None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for last in (False, True):
        with accelerator.accumulate(model):
            if last:
                optimizer.zero_grad()
                with pytest.raises(AccelError, match="not a tensor"):
                    accelerator.backward(None)
            else:
                accelerator.backward(loss_of(model))
    with accelerator.accumulate(model):
        assert model.weight.grad is None


@pytest.mark.parametrize(
    ("patch", "is_torchs"),
    [
        (lambda plain: plain, True),
        (around, False),
        (lambda plain: wraps(plain)(around(plain)), False),
        (lambda plain: torch.compiler.disable(around(plain)), False),
        (lambda plain: Mock(wraps=plain), False),
    ],
    ids=["torch", "function", "wrapping", "disabled", "mock"],
)
def test_what_a_program_puts_where_torch_had_its_own_is_told_from_it(patch, is_torchs):
    for plain in (Tensor.backward, torch.optim.Optimizer.zero_grad):
        assert (torchs_own(patch(plain)) is not None) == is_torchs


OWN_BACKWARD = """
from accel_core import Card, hooks, implements

class Plugin:
    def __init__(self, config, run):
        self.given = []

    @implements(hooks.backward)
    def backward(self, unit, loss, boundary, options):
        self.given.append((loss.item(), dict(options)))
        loss.backward(**options)

CARD = Card(name="own", slot="strategy", summary="A toy.", api_version="1.0", implementation="toy_own:Plugin")
"""


def test_a_strategy_with_a_backward_of_its_own_is_given_the_divided_loss(toy_plugin):
    toy_plugin("own", "strategy", source=OWN_BACKWARD)
    accelerator = Accelerator(cpu=True, strategy="own", gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    model = accelerator.prepare(model)

    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model))

    (unit,) = accelerator.run.units
    assert unit.plugin.given == [(15 / 2, {})]
    assert model.weight.grad.item() == 5 / 2
    accelerator.end_training()
