"""An optimizer's granularity is measured: by small tensors that it steps whole and in parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel_core import optimizer_like, requires_closure, step_granularity

CPU = torch.device("cpu")


def made(kind, *, groups=1, **options):
    parameters = [nn.Parameter(torch.full((3, 3), 2.0)) for _ in range(2 * groups)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return kind([{"params": parameters[n::groups]} for n in range(groups)], **options)


class Rule(Optimizer):
    """Another library's optimizer; nothing is known of its name."""

    def __init__(self, parameters, lr=0.1, **options):
        super().__init__(parameters, {"lr": lr, **options})
        self.prepare_step(0)

    def prepare_step(self, number):
        self.number = number

    @torch.no_grad()
    def step(self, closure=None):
        self.prepare_step(self.number + 1)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * self.update_of(parameter))


class SignOfGradient(Rule):
    def update_of(self, parameter):
        return parameter.grad.sign()


class LayerWiseRate(Rule):
    """As LAMB and LARS do."""

    def update_of(self, parameter):
        return parameter.grad * parameter.norm() / parameter.grad.norm()


class OneStepSize(Rule):
    """As Prodigy and D-Adaptation do, from the second step."""

    def update_of(self, parameter):
        gradients = [each.grad for group in self.param_groups for each in group["params"]]
        return parameter.grad * (1 if self.number < 2 else nn.utils.get_total_norm(gradients))


class Noise(Rule):
    def update_of(self, parameter):
        return torch.randn_like(parameter)


class FromTheThousandthStep(LayerWiseRate):
    def update_of(self, parameter):
        return parameter.grad if self.number < 1000 else super().update_of(parameter)


ELEMENTS = [
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
    "SGD",
]


@pytest.mark.parametrize("name", ELEMENTS)
def test_most_of_torchs_optimizers_step_single_elements(name):
    assert step_granularity(made(getattr(torch.optim, name), lr=0.1), CPU) == "element"


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"amsgrad": True, "maximize": True}])
def test_options_of_adam_do_not_change_that(options):
    assert step_granularity(made(torch.optim.AdamW, **options), CPU) == "element"


@pytest.mark.parametrize(
    ("kind", "granularity"),
    [
        (torch.optim.Adafactor, "tensor"),
        (torch.optim.Muon, "tensor"),
        (torch.optim.LBFGS, "model"),
        (SignOfGradient, "element"),
        (LayerWiseRate, "tensor"),
        (OneStepSize, "model"),
    ],
)
def test_other_optimizers_are_known_by_what_they_compute(kind, granularity):
    assert step_granularity(made(kind), CPU) == granularity


def test_a_name_decides_nothing():
    assert step_granularity(made(type("Lamb", (SGD,), {})), CPU) == "element"


def test_an_optimizer_says_that_it_steps_single_elements():
    optimizer = made(LayerWiseRate)
    optimizer.elementwise = True
    assert step_granularity(optimizer, CPU) == "element"


def test_an_optimizer_says_that_it_will_not_step_single_elements():
    optimizer = made(FromTheThousandthStep)
    assert step_granularity(optimizer, CPU) == "element"
    optimizer.elementwise = False
    assert step_granularity(optimizer, CPU) == "tensor"


@pytest.mark.parametrize(("kind", "required"), [(torch.optim.LBFGS, True), (SGD, False), (Rule, False)])
def test_lbfgs_requires_a_closure(kind, required):
    assert requires_closure(made(kind)) == required


def test_the_first_rate_of_a_warmup_may_be_zero():
    optimizer = made(LayerWiseRate)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert step_granularity(optimizer, CPU) == "tensor"


def test_a_rate_of_a_compiled_step_stays_a_tensor():
    optimizer = made(torch.optim.AdamW, lr=torch.tensor(0.0), capturable=False)
    assert step_granularity(optimizer, CPU) == "element"
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.0)


def test_each_group_is_stepped_by_its_own_hyperparameters():
    optimizer = made(torch.optim.SGD, groups=3, lr=0.1)
    optimizer.param_groups[1] |= {"momentum": 0.9, "nesterov": True}
    assert step_granularity(optimizer, CPU) == "element"


@pytest.mark.parametrize("kind", [Noise, torch.optim.SparseAdam])
def test_an_optimizer_that_cannot_be_measured_needs_the_whole_model(kind):
    assert step_granularity(made(kind), CPU) == "model"


class Lookahead(Optimizer):
    def __init__(self, inner):
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, {}

    def step(self, closure=None):
        self.inner.step(closure)


def test_a_wrapper_of_an_optimizer_is_not_stepped():
    inner = made(SGD, lr=0.1)
    assert step_granularity(Lookahead(inner), CPU) == "model"
    assert all((parameter == 2).all() for group in inner.param_groups for parameter in group["params"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, LayerWiseRate, Noise])
def test_a_measurement_leaves_no_trace(kind):
    optimizer = made(kind, lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    every = register_optimizer_step_post_hook(lambda *_: calls.append("every"))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    before = optimizer.state_dict(), vars(optimizer).keys() - {"number"}, torch.get_rng_state()
    step_granularity(optimizer, CPU)
    every.remove()
    torch.testing.assert_close(optimizer.state_dict(), before[0])
    assert vars(optimizer).keys() - {"number"} == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert calls == []
    assert getattr(optimizer, "number", 0) == 0
    assert all((parameter == 2).all() for group in optimizer.param_groups for parameter in group["params"])


def test_the_state_of_earlier_steps_does_not_matter():
    optimizer = made(torch.optim.AdamW)
    optimizer.step()
    assert step_granularity(optimizer, CPU) == "element"


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, SignOfGradient])
def test_an_optimizer_with_the_same_rule_steps_other_tensors(kind):
    optimizer = made(kind, lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    other = nn.Parameter(torch.full((4,), 2.0))
    other.grad = torch.ones(4)
    like = optimizer_like(optimizer, [{"params": [other]}])
    like.step()
    assert type(like) is kind
    assert all((each == 2).all() for each in optimizer.param_groups[0]["params"])
    optimizer.step()
    assert torch.equal(other[:3], optimizer.param_groups[0]["params"][0][0])


class Counting(torch.optim.SGD):
    """Keeps numbers and tensors of its own."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.history, self.count = [], torch.zeros(())

    def step(self, closure=None):
        self.history.append(1)
        self.count += 1
        return super().step(closure)


def test_what_the_optimizer_keeps_stays_as_it_is():
    optimizer = Counting([nn.Parameter(torch.ones(4))])
    assert step_granularity(optimizer, torch.device("cpu")) == "element"
    assert (optimizer.history, optimizer.count.item()) == ([], 0)
