"""Tensors that wrap others, as quantised ones do, in the state of optimizers and of registered objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator, CheckpointError


class Coarse(torch.Tensor):
    """Eighths of a scale, as a library would keep numbers that need not be exact."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values):
        scale = values.abs().amax().clamp(min=1e-6)
        return cls((values / scale * 8).round().to(torch.int8), scale)

    def exact(self):
        return self.codes / 8 * self.scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"Coarse has no {function}")


class Pair(Coarse):
    """A wrapper in a wrapper."""

    def __init__(self, codes, scale):
        super().__init__(codes, scale)
        self.inner = Coarse(codes, scale)

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["inner"].codes, parts["inner"].scale)


class Momentum(torch.optim.SGD):
    """SGD with coarse momentum, which it makes in a parameter's first step."""

    kind = Coarse

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                before = state["momentum"].exact() if state else torch.zeros_like(parameter)
                state["momentum"] = self.kind.of(0.9 * before + parameter.grad)
                parameter.sub_(group["lr"] * state["momentum"].exact())


class PairedMomentum(Momentum):
    kind = Pair


class Whole(Momentum):
    """Of another class of state, under the name of the same optimizer."""

    kind = Pair


Whole.__qualname__ = Momentum.__qualname__


def parts(optimizer, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, optimizer(model.parameters(), lr=0.1)


def steps(model, optimizer, numbers, backward=torch.Tensor.backward):
    for number in numbers:
        backward(model(torch.full((2, 3), 1.0 + number)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def accelerator():
    made = Accelerator(device="cpu")
    yield made
    made.end_training()


def run(optimizer, folder, numbers, load, seed=0):
    accelerator = Accelerator(device="cpu")
    model, prepared = accelerator.prepare(*parts(optimizer, seed))
    try:
        if load:
            accelerator.load_state(folder)
        weights = steps(model, prepared, numbers, accelerator.backward)
        if not load:
            accelerator.save_state(folder)
    finally:
        accelerator.end_training()
    return weights


@pytest.mark.parametrize("optimizer", [Momentum, PairedMomentum])
def test_an_optimizer_goes_on_as_a_plain_loop(optimizer, tmp_path):
    run(optimizer, tmp_path, range(2), load=False)
    resumed = run(optimizer, tmp_path, range(2, 4), load=True, seed=1)
    assert all(map(torch.equal, resumed, steps(*parts(optimizer), range(4))))


def test_a_load_into_an_optimizer_that_has_stepped_replaces_its_state(tmp_path):
    accelerator = Accelerator(device="cpu")
    model, optimizer = accelerator.prepare(*parts(Momentum))
    steps(model, optimizer, range(2), accelerator.backward)
    accelerator.save_state(tmp_path)
    steps(model, optimizer, range(5), accelerator.backward)
    accelerator.load_state(tmp_path)
    resumed = steps(model, optimizer, range(2, 4), accelerator.backward)
    accelerator.end_training()
    assert all(map(torch.equal, resumed, steps(*parts(Momentum), range(4))))


def test_state_that_the_optimizer_makes_otherwise_here_is_refused_by_name(tmp_path):
    run(Momentum, tmp_path, range(1), load=False)
    with pytest.raises(
        CheckpointError, match=r"nothing was loaded:\n.*0.weight/momentum was saved as Coarse"
    ):
        run(Whole, tmp_path, (), load=True)


class Table:
    def __init__(self, *tensors):
        self.tensors = {"moments": [tensors, 1]}

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state


@pytest.mark.parametrize("kind", [Coarse, Pair])
def test_a_registered_object_has_its_wrapped_tensors_again(accelerator, tmp_path, kind):
    table = Table(kind.of(torch.arange(4.0)), kind.of(torch.eye(200)), torch.ones(2))
    accelerator.register_for_checkpointing(table)
    accelerator.save_state(tmp_path)
    table.tensors = {"moments": [(kind.of(torch.ones(4)), kind.of(torch.ones(200, 200)), torch.zeros(2)), 2]}
    accelerator.load_state(tmp_path)

    (first, second, third), number = table.tensors["moments"]
    assert (type(first), type(second), number) == (kind, kind, 1)
    assert torch.equal(first.exact(), kind.of(torch.arange(4.0)).exact())
    assert torch.equal(second.exact(), torch.eye(200))
    assert torch.equal(third, torch.ones(2))


def test_a_registered_object_without_such_a_tensor_is_told_so_before_the_load(accelerator, tmp_path):
    table = Table(Coarse.of(torch.ones(4)))
    accelerator.register_for_checkpointing(table)
    accelerator.save_state(tmp_path)
    table.tensors = {}
    with pytest.raises(CheckpointError, match=r"\['moments'\]\[0\]\[0\] was saved as Coarse \[4\] None"):
        accelerator.load_state(tmp_path)


def test_extra_that_nothing_could_put_together_is_refused_at_the_save(accelerator, tmp_path):
    with pytest.raises(CheckpointError, match=r"extra.moment cannot be stored: .*Coarse is not plain data"):
        accelerator.save_state(tmp_path, extra={"moment": Coarse.of(torch.ones(2))})
