"""A gradient that torch's wrapper would leave unreduced is an error in the backward that brings it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_problem import accelerator, batches, net, rank
from torch import nn
from torch.nn import functional as F

from accel_core import AccelError, LocalSGD
from accel_ddp import DistributedDataParallelKwargs

INSIDE = "no gradient of this wrapper's last forward, but of the model inside or a part of it"


def told(train: Callable[..., Any], accumulation: int = 1, static: bool = False) -> str:
    """The error of this rank; or "equal" or "apart", by the weights at the end."""
    options = DistributedDataParallelKwargs(static_graph=static)
    run = accelerator(options, gradient_accumulation_steps=accumulation)
    given = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    if train is unfrozen:
        given[0].requires_grad_(False)
    try:
        model, optimizer = run.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
        for number, (x, y) in enumerate(batches(3, rank())):
            train(run, model, optimizer, number, lambda out, y=y: F.mse_loss(out, y), x)
            optimizer.zero_grad()
    except AccelError as error:
        return str(error)
    finally:
        torch.distributed.barrier()
    mine = torch.cat([p.detach().flatten() for p in given.parameters()])
    everyone = run.gather(mine[None])
    run.end_training()
    return "equal" if torch.equal(everyone[0], everyone[1]) else "apart"


def ordinary(run, model, optimizer, number, loss, x):
    run.backward(loss(model(x)))
    optimizer.step()


def by_hand(run, model, optimizer, number, loss, x):
    loss(model(x)).backward()
    optimizer.step()


def evaluating_between(run, model, optimizer, number, loss, x):
    out = model(x)
    with torch.no_grad():
        model(x)
    run.backward(loss(out))
    optimizer.step()


def forward_and_backward_in_turn_twice(run, model, optimizer, number, loss, x):
    for _ in range(2):
        run.backward(loss(model(x)))
    optimizer.step()


def accumulating(run, model, optimizer, number, loss, x):
    with run.accumulate(model):
        run.backward(loss(model(x)))
        optimizer.step()


def in_two_no_syncs(run, model, optimizer, number, loss, x):
    with run.no_sync(model):
        run.backward(loss(model(x)))
    run.backward(loss(model(x)))
    optimizer.step()


def stepping_alone_by_local_sgd(run, model, optimizer, number, loss, x):
    with LocalSGD(run, model, 1) as local:
        run.backward(loss(model(x)))
        optimizer.step()
        local.step()


@pytest.mark.parametrize(
    "train",
    [
        ordinary,
        by_hand,
        evaluating_between,
        forward_and_backward_in_turn_twice,
        in_two_no_syncs,
        stepping_alone_by_local_sgd,
    ],
)
@pytest.mark.by_default
def test_what_reduces_trains_alike(train: Callable[..., Any], run_processes) -> None:
    assert run_processes(told, train) == ["equal", "equal"]


def test_a_window_trains_alike(run_processes) -> None:
    assert run_processes(told, accumulating, 3) == ["equal", "equal"]


def ending_the_window_by_hand(run, model, optimizer, number, loss, x):
    with run.accumulate(model):
        if number:
            run.sync_gradients = True
        run.backward(loss(model(x)))
        optimizer.step()


def test_a_window_that_is_ended_before_its_size_trains_alike(run_processes) -> None:
    assert run_processes(told, ending_the_window_by_hand, 3) == ["equal", "equal"]


def by_a_closure(run, model, optimizer, number, loss, x):
    def closure():
        optimizer.zero_grad()
        found = loss(model(x))
        run.backward(found)
        return found

    optimizer.step(closure)


@pytest.mark.parametrize("train", [ordinary, in_two_no_syncs, by_a_closure])
def test_a_static_graph_trains_alike(train: Callable[..., Any], run_processes) -> None:
    assert run_processes(told, train, 1, True) == ["equal", "equal"]


def unwrapped(run, model, optimizer, number, loss, x):
    run.backward(loss(run.unwrap_model(model)(x)))
    optimizer.step()


def by_its_parts(run, model, optimizer, number, loss, x):
    inner = run.unwrap_model(model)
    run.backward(loss(inner[2](torch.tanh(inner[0](x)))))
    optimizer.step()


def by_a_later_part(run, model, optimizer, number, loss, x):
    run.backward(loss(run.unwrap_model(model)[2](x[:, :4])))
    optimizer.step()


def by_a_later_part_as_well(run, model, optimizer, number, loss, x):
    run.backward(loss(model(x)))
    by_a_later_part(run, model, optimizer, number, loss, x)


def unwrapped_in_a_closure(run, model, optimizer, number, loss, x):
    by_a_closure(run, run.unwrap_model(model), optimizer, number, loss, x)


def twice_of_one_forward(run, model, optimizer, number, loss, x):
    found = loss(model(x))
    run.backward(found, retain_graph=True)
    run.backward(found)
    optimizer.step()


def forwards_before_backwards(run, model, optimizer, number, loss, x):
    first, second = loss(model(x)), loss(model(2 * x))
    run.backward(first)
    run.backward(second)
    optimizer.step()


def forward_in_no_sync(run, model, optimizer, number, loss, x):
    with run.no_sync(model):
        found = loss(model(x))
    run.backward(found)
    optimizer.step()


def unfrozen(run, model, optimizer, number, loss, x):
    if number == 1:
        run.unwrap_model(model)[0].requires_grad_(True)
    run.backward(loss(model(x)))
    optimizer.step()


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (unwrapped, INSIDE),
        (by_its_parts, INSIDE),
        (by_a_later_part, INSIDE),
        (by_a_later_part_as_well, INSIDE),
        (unwrapped_in_a_closure, INSIDE),
        (twice_of_one_forward, "of a second backward"),
        (forwards_before_backwards, "of a second backward"),
        (forward_in_no_sync, "gradients of unit .* are not reduced"),
        (
            unfrozen,
            r"2 parameter\(s\) were frozen when the model was prepared and are trained now \(0.weight\)",
        ),
    ],
)
def test_what_would_train_ranks_apart_is_an_error(
    train: Callable[..., Any], said: str, run_processes
) -> None:
    for found in run_processes(told, train):
        assert re.search(said, found), found


def growing(run, model, optimizer, number, loss, x):
    optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})


def test_parameters_that_came_after_prepare_are_refused_by_the_optimizer(run_processes) -> None:
    for found in run_processes(told, growing):
        assert "add_param_group: a parameter for the SGD was not in its models when" in found


def hooked_before() -> str:
    run, model = accelerator(), net()
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    try:
        run.prepare(model)
    except AccelError as error:
        return str(error)
    return ""


def test_hooks_that_would_see_unreduced_gradients_are_refused_in_prepare(run_processes) -> None:
    assert all(
        "ddp: 0.weight of the Sequential has a hook" in found for found in run_processes(hooked_before)
    )


def odd_parameter() -> str:
    run, model = accelerator(), net()
    codes = nn.Parameter(torch.zeros(3, dtype=torch.int16), requires_grad=False)
    model.register_parameter("codes", codes)
    try:
        run.prepare(model)
    except AccelError as error:
        return str(error)
    return ""


def test_a_parameter_that_no_group_carries_is_named(run_processes) -> None:
    assert all("codes (torch.int16)" in found for found in run_processes(odd_parameter))


def released() -> tuple[int, int]:
    run, model = accelerator(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    run.end_training()
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    return sum(hooks), len(optimizer._optimizer_step_pre_hooks)


def test_no_hook_is_left_after_the_run(run_processes) -> None:
    assert run_processes(released) == [(0, 0), (0, 0)]


class Choosing(nn.Module):
    """One part for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[rank()](x)


def in_parts_of_its_own(optimizers: int) -> tuple[list[float], list[float]]:
    """Gradients that torch averaged, and what the steps moved by them, of each part."""
    run = accelerator(DistributedDataParallelKwargs(find_unused_parameters=True))
    torch.manual_seed(0)
    given = Choosing()
    groups = [[*part.parameters()] for part in given.parts] if optimizers == 2 else [[*given.parameters()]]
    model, *steppers = run.prepare(given, *(torch.optim.SGD(group, lr=1.0) for group in groups))
    before = [p.detach().clone() for p in given.parameters()]
    run.backward(model(batches(1, rank())[0][0]).square().mean())
    gradients = [float(p.grad.sum()) for p in given.parameters()]
    for optimizer in steppers:
        optimizer.step()
    moved = [float((old - p).detach().sum()) for old, p in zip(before, given.parameters(), strict=True)]
    run.end_training()
    return gradients, moved


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_rank_steps_with_averages_of_parts_that_only_other_ranks_used(
    optimizers: int, run_processes
) -> None:
    (gradients, moved), other = run_processes(in_parts_of_its_own, optimizers)
    assert (gradients, moved) == other
    assert moved == pytest.approx(gradients, abs=1e-5)
    assert all(gradients)


def penalised(find: bool, adds: bool) -> str:
    """A gradient penalty: the last bias is in the forward's graph, and not in the loss."""
    run = accelerator(DistributedDataParallelKwargs(find_unused_parameters=find))
    given = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    model, optimizer = run.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
    try:
        for x, _ in batches(3, rank()):
            inputs = x.requires_grad_()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            loss = slope.norm(dim=1).sub(1).square().mean()
            run.backward(loss + 0 * sum(p.sum() for p in model.parameters()) if adds else loss)
            optimizer.step()
            optimizer.zero_grad()
    except AccelError as error:
        return str(error)
    finally:
        torch.distributed.barrier()
        run.end_training()
    return ""


def test_the_advice_for_a_parameter_without_a_gradient_is_not_what_is_followed_already(run_processes) -> None:
    for find, advice in (
        (False, "set ddp.find_unused_parameters: true"),
        (True, "freeze them before prepare"),
    ):
        for told in run_processes(penalised, find, False):
            assert "gave no gradient to 2.bias (1 in all)" in told
            assert advice in told.splitlines()[-1]
            assert ("find_unused_parameters" in told) is not find


def test_a_parameter_added_to_the_loss_times_0_has_a_gradient(run_processes) -> None:
    assert run_processes(penalised, True, True) == ["", ""]
