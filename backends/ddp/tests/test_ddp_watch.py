"""Ranks that would train apart, where torch says nothing, are stopped before the first wrong step."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_problem import accelerator, batches, net, rank
from torch import nn
from torch.nn import functional as F

from accel_core import AccelError, LocalSGD
from accel_ddp import DistributedDataParallelKwargs


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
        if "of this rank alone" not in str(error) and str(error).startswith("ddp: "):  # of a step
            with pytest.raises(AccelError):  # once more, as long as the gradients are there
                optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
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


def assign_gradients(model, loss, of_all=lambda gradient: gradient):
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = of_all(gradient)


def averaged_by_hand(run, model, optimizer, number, loss, x):
    with run.no_sync(model):
        found = loss(model(x))
    assign_gradients(model, found, partial(run.reduce, reduction="mean"))
    optimizer.step()


@pytest.mark.parametrize(
    "train",
    [
        ordinary,
        by_hand,
        evaluating_between,
        forward_and_backward_in_turn_twice,
        in_two_no_syncs,
        stepping_alone_by_local_sgd,
        averaged_by_hand,
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


def in_backward(run, model, optimizer, number, loss, x):
    if number == 0:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad))
    run.backward(loss(model(x)))


def by_autograd_grad(run, model, optimizer, number, loss, x):
    assign_gradients(model, loss(model(x)))
    optimizer.step()


def by_autograd_grad_in_memory_that_stays(run, model, optimizer, number, loss, x):
    optimizer.zero_grad(set_to_none=False)
    by_autograd_grad(run, model, optimizer, number, loss, x)


def converted(run, model, optimizer, number, loss, x):
    model.double()
    run.backward(loss(model(x.double()).float()))
    optimizer.step()


def converted_and_back(run, model, optimizer, number, loss, x):
    model.double().float()
    ordinary(run, model, optimizer, number, loss, x)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (converted_and_back, "converted to another dtype or device"),
        (unwrapped, "was called on the model inside"),
        (by_its_parts, "was called on the model inside"),
        (by_a_later_part, "was called on .* a part of it"),
        (by_a_later_part_as_well, "is the second of .* two forwards in a row, or was called on a part"),
        (unwrapped_in_a_closure, "was called on the model inside"),
        (twice_of_one_forward, "is the second of one forward"),
        (forwards_before_backwards, "is the second of .* two forwards in a row"),
        (forward_in_no_sync, "its forward ran inside"),
        (unfrozen, r"2 parameter\(s\) .* were frozen when it was prepared and train now \(0.weight\)"),
        (in_backward, "register_post_accumulate_grad_hook"),
        (by_autograd_grad, "gradients were assigned, as from torch.autograd.grad"),
        (by_autograd_grad_in_memory_that_stays, "gradients were assigned, as from torch.autograd.grad"),
        (converted, "converted to another dtype or device"),
    ],
)
def test_what_would_train_ranks_apart_is_an_error(
    train: Callable[..., Any], said: str, run_processes
) -> None:
    for found in run_processes(told, train):
        assert re.search(said, found), found


@pytest.mark.parametrize(
    ("train", "said"),
    [(unwrapped, "was called on the model inside"), (forward_in_no_sync, "its forward ran inside")],
)
def test_a_static_graph_is_watched_too(train: Callable[..., Any], said: str, run_processes) -> None:
    for found in run_processes(told, train, 1, True):
        assert re.search(said, found), found


def growing(run, model, optimizer, number, loss, x):
    optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})


def test_parameters_that_came_after_prepare_are_refused_by_the_optimizer(run_processes) -> None:
    for found in run_processes(told, growing):
        assert "add_param_group: a parameter for the SGD was not in its models when" in found


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 4), nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        return torch.stack([self.heads[each](hidden) for each in used]).sum(0)


def headed(used: list[list[int]], find: bool) -> str:
    """The error in this rank's first step; or "equal" or "apart", by the weights after two."""
    run = accelerator(DistributedDataParallelKwargs(find_unused_parameters=find))
    given = Heads()
    try:
        model, optimizer = run.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
        for step, (x, y) in enumerate(batches(2, rank())):
            run.backward(F.mse_loss(model(x, used[rank()]), y))
            try:
                optimizer.step()
            except AccelError as error:
                return f"step {step}: {error}"
            optimizer.zero_grad()
    except AccelError as error:
        return str(error)
    mine = torch.cat([p.detach().flatten() for p in given.parameters()])
    everyone = run.gather(mine[None])
    run.end_training()
    return "equal" if torch.equal(everyone[0], everyone[1]) else "apart"


def test_ranks_that_use_different_parameters_are_refused_in_that_step(run_processes) -> None:
    for found, head in zip(
        run_processes(headed, [[0, 2], [1, 2]], False), ("heads.1", "heads.0"), strict=True
    ):
        said = rf"step 0: ddp: .* no gradient to {head}.weight, {head}.bias, so .*\n.*find_unused_parameters"
        assert re.match(said, found), found


def test_a_rank_that_leaves_out_parameters_is_refused_while_others_wait(run_processes) -> None:
    _, found = run_processes(headed, [[0, 1, 2], [0]], False)
    assert re.match(r"step 0: ddp: .* no gradient to heads.1.weight, .* and 1 more, so", found), found


def test_with_unused_parameters_found_they_train_alike(run_processes) -> None:
    assert run_processes(headed, [[0, 2], [1, 2]], True) == ["equal", "equal"]


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


def unseen(kind: str, folder: str) -> str:
    """Train apart in a way that no step notices, then save: the error of the save."""
    run = accelerator(DistributedDataParallelKwargs(static_graph=kind == "two backwards"))
    given = net()
    optimizer: Any = torch.optim.SGD(given.parameters(), lr=0.1)
    if kind == "unprepared":
        model = run.prepare(given)
    else:
        model, optimizer = run.prepare(given, optimizer)
    for x, y in batches(2, rank()):
        if kind == "unprepared":
            F.mse_loss(given(x), y).backward()
        else:
            loss = F.mse_loss(model(x), y)
            run.backward(loss, retain_graph=True)
            run.backward(2 * loss)
        optimizer.step()
        optimizer.zero_grad()
    try:
        run.save_state(folder)
    except AccelError as error:
        return str(error)
    finally:
        run.end_training()
    return ""


@pytest.mark.parametrize("kind", ["unprepared", "two backwards"])
def test_ranks_that_no_step_sees_drift_are_refused_by_the_next_save(
    tmp_path: Path, kind: str, run_processes
) -> None:
    for told in run_processes(unseen, kind, str(tmp_path / "ck")):
        assert "ranks hold different contents of what should be the same on all" in told


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


ODD = (torch.int16, torch.uint16, torch.float8_e4m3fn)


def odd_buffers() -> list[list[float]]:
    run, model = accelerator(), net()
    for number, dtype in enumerate(ODD):
        values = torch.full((2, 3), 1.0 + 2 * rank()).to(dtype)
        model.register_buffer(f"codes{number}", values if number else values[0, 0].clone())
    given, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: list[list[float]] = []

    def look() -> None:
        found.append([each.float().mean().item() for name, each in model.named_buffers() if "codes" in name])

    def fill(value: float) -> None:
        for name, each in model.named_buffers():
            if "codes" in name:
                each.copy_(torch.full((), value).to(each.dtype))

    look()
    fill(4.0 + 4 * rank())
    (x, y), *_ = batches(1, rank())
    given(x)
    look()
    with run.join_uneven_inputs([given]):
        for _ in range(1 + rank()):
            run.backward(F.mse_loss(given(x), y))
            optimizer.step()
            optimizer.zero_grad()
            fill(6.0 + 2 * rank())
    look()
    run.end_training()
    return found


def test_buffers_that_no_group_carries_travel_as_bytes(run_processes) -> None:
    assert run_processes(odd_buffers) == [[[1.0] * 3, [4.0] * 3, [8.0] * 3]] * 2


def released() -> tuple[int, int]:
    run, model = accelerator(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    run.end_training()
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    return sum(hooks), len(optimizer._optimizer_step_pre_hooks)


def test_nothing_is_watched_after_the_run(run_processes) -> None:
    assert run_processes(released) == [(0, 0), (0, 0)]


class Around(torch.optim.Optimizer):
    """A wrapper of an optimizer, without the hooks that torch's `__init__` makes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def steps_of_a_wrapper() -> list[str]:
    said = []
    for closure in (False, True):
        run, given = accelerator(), net()
        model, optimizer = run.prepare(given, Around(torch.optim.SGD(given.parameters(), lr=0.1)))
        for whole in (model, given):
            x, _ = batches(1, rank())[0]
            compute = partial(_loss, run, whole, x)
            try:
                optimizer.step(compute) if closure else (compute(), optimizer.step())
                said.append("")
            except AccelError as error:
                said.append(str(error))
        torch.distributed.barrier()
        run.end_training()
    return said


def _loss(run: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    run.backward(loss)
    return loss


def test_an_optimizer_without_torchs_hooks_is_watched_too(run_processes) -> None:
    for right, apart, *closures in run_processes(steps_of_a_wrapper):
        assert (right, closures[0]) == ("", "")
        assert all("would train a model of its own" in each for each in (apart, closures[1]))


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


def converted_in_part() -> str:
    run = accelerator(DistributedDataParallelKwargs(find_unused_parameters=True))
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)), nn.Linear(4, 1))
    wrapped, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[0][1].double().float()
    run.backward(wrapped(batches(1, rank())[0][0]).mean())
    with pytest.raises(AccelError) as caught:
        optimizer.step()
    run.end_training()
    return str(caught.value)


def test_a_part_that_was_converted_is_an_error_where_torch_takes_it_for_unused(run_processes) -> None:
    for said in run_processes(converted_in_part):
        assert "came after its weights were converted" in said
