"""The trial that tells which optimizers treat each element of their weights by itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from accel_core import AccelError, is_elementwise

KINDS = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD"]


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in [(3, 5), (5,), ()]]


class Scaled(torch.optim.SGD):
    """SGD whose step is as long as the weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(group["lr"] * weight.norm() * weight.grad / weight.grad.norm())


class Projected(torch.optim.SGD):
    """SGD that leaves a matrix alone whose gradient is orthogonal to it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                along = torch.cosine_similarity(weight.flatten(), weight.grad.flatten(), dim=0).abs()
                if weight.ndim < 2 or along > 1e-6:
                    weight.sub_(group["lr"] * weight.grad)


class Loud(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("asked to fail")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.0, 1e-6, torch.tensor(1e-3)])
def test_optimizers_of_single_elements_are_told(kind, rate):
    assert is_elementwise(getattr(torch.optim, kind)(weights(), lr=rate)) is True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_weights_may_have_any_dtype(dtype):
    assert is_elementwise(torch.optim.AdamW([nn.Parameter(torch.ones(3, 5, dtype=dtype))])) is True


class OfOneGroup(torch.optim.SGD):
    """SGD whose steps are as long as the weight in one group, and very small."""

    def __init__(self, weights: list[nn.Parameter], lr: float) -> None:
        groups = [{"params": weights[:1], "name": "matrices"}, {"params": weights[1:], "name": "others"}]
        super().__init__(groups, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                by = 1e-4 * weight.norm() if group["name"] == "others" else 1.0
                weight.sub_(group["lr"] * by * weight.grad)


class Clipped(torch.optim.SGD):
    """SGD that clips the gradients of all weights by their norm."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([w for group in self.param_groups for w in group["params"]], 50.0)
        super().step()


@pytest.mark.parametrize("kind", [Scaled, Projected, OfOneGroup, Clipped, torch.optim.Adafactor])
def test_optimizers_of_whole_weights_are_told(kind):
    assert is_elementwise(kind(weights(), lr=1e-3)) is False


def test_an_optimizer_that_fails_on_pieces_needs_whole_weights():
    assert is_elementwise(torch.optim.Muon([weights()[0]])) is False


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Loud])
def test_of_what_cannot_step_in_a_trial_nothing_is_told(kind):
    assert is_elementwise(kind(weights())) is None


@pytest.mark.parametrize("says", [True, False])
def test_an_optimizer_may_say_it(says):
    optimizer = Scaled(weights(), lr=1.0)
    optimizer.elementwise = says
    assert is_elementwise(optimizer) is says


class Drawing(torch.optim.AdamW):
    """AdamW that draws numbers of all sorts, and uses none."""

    def step(self, closure: Any = None) -> None:
        random.random()
        np.random.rand()  # noqa: NPY002 - the global stream
        torch.rand(())
        super().step()


def test_the_optimizer_and_its_weights_stay_as_they_are():
    params, seen = weights(), []
    optimizer = Drawing(params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("hook"))
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    StepLR(optimizer, 1)  # which replaces `step` of this one
    params[0].grad = torch.ones(3, 5)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    state = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
    seen.clear()
    stream, others = torch.get_rng_state(), (random.getstate(), np.random.get_state()[2])  # noqa: NPY002

    assert is_elementwise(optimizer) is True
    assert not seen
    assert torch.equal(torch.get_rng_state(), stream)
    assert (random.getstate(), np.random.get_state()[2]) == others  # noqa: NPY002
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    assert all(torch.equal(optimizer.state[params[0]][key], value) for key, value in state.items())
    assert torch.equal(params[0].grad, torch.ones(3, 5))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in params]


def test_what_gives_something_back_at_its_end_is_not_copied():
    given_back = []

    class Held(torch.optim.SGD):
        def __del__(self) -> None:
            given_back.append(self)

    optimizer = Held(weights(), lr=0.1)
    assert is_elementwise(optimizer) is None
    assert not given_back


def test_many_groups_cost_no_more_than_one():
    stepped = []

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            stepped.extend(weight for group in self.param_groups for weight in group["params"])
            super().step()

    alike = [{"params": [nn.Parameter(torch.ones(2, 2))], "lr": 1 / (1 + number)} for number in range(50)]
    other = {"params": [nn.Parameter(torch.ones(2, 2))], "momentum": 0.9}
    assert is_elementwise(Counted([*alike, other], lr=0.1)) is True
    assert len({id(weight) for weight in stepped[:2]}) == 2
    assert len(stepped) == 2 * 3 * 10


def test_a_step_that_reaches_the_weights_by_another_way_is_an_error():
    params = weights()

    class Shrinking(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            params[0].mul_(0.9)

    with pytest.raises(AccelError, match="a copy of it stepped small weights, and changed the model's"):
        is_elementwise(Shrinking(params, lr=0.1))


def test_what_an_optimizer_keeps_of_real_weights_is_not_mistaken_for_a_need_of_whole_ones():
    class Keeping(torch.optim.SGD):
        def __init__(self, weights: list[nn.Parameter], lr: float) -> None:
            super().__init__(weights, lr=lr)
            self.kept = [torch.zeros_like(weight) for weight in weights]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for weight, kept in zip(self.param_groups[0]["params"], self.kept, strict=True):
                weight.sub_(kept.add_(weight.grad))

    assert (
        is_elementwise(Keeping([nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(8))], lr=0.1)) is None
    )
