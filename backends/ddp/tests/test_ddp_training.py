"""Two processes train as plain DistributedDataParallel does, bitwise."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ddp_problem import (
    accelerator,
    batches,
    equal,
    net,
    plain_group,
    rank,
    train_ours,
    train_plainly,
    weights,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from accel_core import AccelError
from accel_ddp import DistributedDataParallelKwargs
from accel_testing import Traffic


def ours(arguments: dict[str, Any], steps: int, accumulate: int) -> dict[str, torch.Tensor]:
    return train_ours(DistributedDataParallelKwargs(**arguments), steps=steps, accumulate=accumulate)


def assert_trains_as_plain_ddp(run_processes, arguments: dict[str, Any], steps: int, accumulate: int) -> None:
    trained = run_processes(ours, arguments, steps, accumulate)
    plain = run_processes(train_plainly, arguments, None, steps, accumulate)
    assert [equal(*pair) for pair in zip(trained, plain, strict=True)] == [True, True]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.by_default("2")
def test_training_equals_plain_ddp_bitwise(accumulate: int, run_processes) -> None:
    assert_trains_as_plain_ddp(run_processes, {}, 6, accumulate)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bucket_cap_mb": 1},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.by_default
def test_an_argument_trains_as_in_plain_ddp(
    arguments: dict[str, Any], accumulate: int, run_processes
) -> None:
    assert_trains_as_plain_ddp(run_processes, arguments, 4, accumulate)


def train_prepared_anew(ends: bool) -> dict[str, torch.Tensor]:
    run = accelerator()
    model = net(run.process_index)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, (x, y) in enumerate(batches(4, run.process_index)):
        if number == 2:
            run.end_training() if ends else run.free_memory()
            run = accelerator() if ends else run
            model, optimizer = run.prepare(model, optimizer)
        run.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return weights(run.unwrap_model(model))


@pytest.mark.parametrize("ends", [False, True], ids=["free_memory", "another run"])
def test_a_wrapped_model_is_prepared_anew(ends: bool, run_processes) -> None:
    trained = run_processes(train_prepared_anew, ends)
    plain = run_processes(train_plainly, {}, None, 4, 1)
    assert [equal(*pair) for pair in zip(trained, plain, strict=True)] == [True, True]


def use_a_released_model(ends: bool) -> tuple[str, bool]:
    run = accelerator()
    model = run.prepare(net())
    x, _ = batches(1, 0)[0]
    inside, before = run.unwrap_model(model), model(x)
    run.end_training() if ends else run.free_memory()
    with pytest.raises(AccelError) as raised:
        model(x)
    return str(raised.value), torch.equal(inside(x), before)


@pytest.mark.parametrize("ends", [False, True], ids=["free_memory", "end_training"])
def test_a_forward_of_a_released_model_says_what_to_call(ends: bool, run_processes) -> None:
    for message, is_equal in run_processes(use_a_released_model, ends):
        assert "prepare the model again, or use accelerator.unwrap_model(model)" in message
        assert is_equal


def attributes(arguments: dict[str, Any]) -> dict[str, Any]:
    run = accelerator(DistributedDataParallelKwargs(**arguments))
    model = run.prepare(net())
    names = (
        "dim",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "static_graph",
        "broadcast_buffers",
    )
    found = {name: getattr(model, name) for name in names}
    found["bucket_cap_mb"] = model.bucket_bytes_cap / 2**20
    run.end_training()
    return found


def test_every_argument_reaches_the_wrapper(run_processes) -> None:
    given = {
        "dim": 1,
        "find_unused_parameters": False,  # torch warns that static_graph finds them anyway
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "bucket_cap_mb": 7,
        "broadcast_buffers": False,
    }

    found = run_processes(attributes, given)

    assert found == [given] * 2


def buffers_after_a_forward(broadcast: bool) -> torch.Tensor:
    run = accelerator(DistributedDataParallelKwargs(broadcast_buffers=broadcast))
    model = run.prepare(net())
    run.unwrap_model(model)[1].running_mean.fill_(float(run.process_index))
    model(torch.zeros(8, 6))
    found = run.unwrap_model(model)[1].running_mean.detach().clone()
    run.end_training()
    return found


def test_buffers_are_rank_0s_unless_that_is_switched_off(run_processes) -> None:
    same = run_processes(buffers_after_a_forward, True)
    own = run_processes(buffers_after_a_forward, False)

    assert torch.equal(same[0], same[1])
    assert not torch.equal(own[0], own[1])


def first_weights() -> dict[str, torch.Tensor]:
    run = accelerator()
    model = run.prepare(net(seed=run.process_index))
    found = weights(run.unwrap_model(model))
    run.end_training()
    return found


def test_all_ranks_start_with_the_weights_of_rank_0(run_processes) -> None:
    found = run_processes(first_weights)

    assert equal(found[0], found[1])
    assert equal(found[1], weights(net(seed=0)))


def wrapped_types(world: int) -> list[str]:
    run = accelerator(strategy="ddp")
    teacher = net().requires_grad_(False)
    found = [type(run.prepare(model)).__name__ for model in (net(), teacher)]
    run.end_training()
    return found


def test_a_model_that_trains_nothing_stays_unwrapped(run_processes) -> None:
    assert run_processes(wrapped_types, 2) == [["DistributedDataParallel", "Sequential"]] * 2


def test_in_a_world_of_one_nothing_is_wrapped(run_processes) -> None:
    assert run_processes(wrapped_types, 1, world=1) == [["Sequential", "Sequential"]]


def unwrapped() -> tuple[bool, bool]:
    run = accelerator()
    model = net()
    prepared = run.prepare(model)
    found = (isinstance(prepared, DistributedDataParallel), run.unwrap_model(prepared) is model)
    run.end_training()
    return found


def test_unwrapping_gives_the_users_own_module(run_processes) -> None:
    assert run_processes(unwrapped) == [(True, True)] * 2


def collectives(model: nn.Module, *, quiet: Any) -> list[str]:
    """The names of the collectives that forward and backward of one batch start."""
    (x, y) = batches(1, rank())[0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, quiet:
        F.mse_loss(model(x), y).backward()
    return [event.name for event in profile.events() if event.name.startswith("c10d::")]


def counted() -> tuple[list[str], list[str], list[str]]:
    run = accelerator(gradient_accumulation_steps=2)
    model = net()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first = collectives(model, quiet=run.accumulate(model))
    second = collectives(model, quiet=run.accumulate(model))
    alone = collectives(model, quiet=run.no_sync(model))
    run.end_training()
    return first, second, alone


def test_no_gradient_travels_inside_a_window(run_processes) -> None:
    for first, second, alone in run_processes(counted):
        # A window's first forward still copies batch norm's buffers, as in plain torch.
        assert set(first) <= {"c10d::broadcast_"}
        assert "c10d::allreduce_" in second
        assert set(alone) <= {"c10d::broadcast_"}


def sent_by_a_window(by_hand: bool) -> dict[str, tuple[int, int]]:
    """What the third window of three micro-batches sends, with clipping."""
    with plain_group() as mine:
        run = None if by_hand else accelerator(gradient_accumulation_steps=3)
        model: Any = net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if run is None:
            model = DistributedDataParallel(model)
        else:
            model, optimizer = run.prepare(model, optimizer)
        for _ in range(3):
            seen = Traffic()
            with seen:
                for number, (x, y) in enumerate(batches(3, mine)):
                    quiet = model.no_sync() if number < 2 else nullcontext()
                    with quiet if run is None else run.accumulate(model):
                        loss = F.mse_loss(model(x), y)
                        if run is None:
                            (loss / 3).backward()
                        else:
                            run.backward(loss)
                clip: Any = nn.utils.clip_grad_norm_ if run is None else run.clip_grad_norm_
                clip(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        if run is not None:
            run.end_training()
    return seen.kinds()


def test_a_window_sends_what_a_loop_by_hand_sends(run_processes) -> None:
    by_hand = run_processes(sent_by_a_window, True)
    assert by_hand[0]["all_reduce"][0] == 1
    assert run_processes(sent_by_a_window, False) == by_hand


def two_models_of_one_unit() -> tuple[list[str], bool]:
    run = accelerator(gradient_accumulation_steps=2)
    encoder, head = nn.Linear(6, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    encoder, head, optimizer = run.prepare(encoder, head, optimizer)
    both = nn.Sequential(encoder, head)
    first = collectives(both, quiet=run.accumulate(encoder, head))
    collectives(both, quiet=run.accumulate(encoder, head))
    gradients = [parameter.grad.flatten() for parameter in both.parameters() if parameter.grad is not None]
    everyones = run.gather(torch.cat(gradients)[None])
    run.end_training()
    return first, torch.equal(everyones[0], everyones[1])


def test_a_window_silences_every_model_of_its_unit(run_processes) -> None:
    assert run_processes(two_models_of_one_unit) == [([], True)] * 2


def teacher_and_student() -> list[float]:
    run = accelerator()
    teacher, student = net(7).requires_grad_(False), net(run.process_index)
    teacher = run.prepare(teacher, strategy="single", name="teacher")
    student, optimizer = run.prepare(student, torch.optim.SGD(student.parameters(), lr=0.05))
    losses = []
    for x, _ in batches(8, run.process_index):
        loss = F.mse_loss(student(x), teacher(x))
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.reduce(loss.detach(), "mean").item())
    run.end_training()
    return losses


def test_a_teacher_of_another_strategy_trains_the_student(run_processes) -> None:
    first, second = run_processes(teacher_and_student)

    assert first == second
    assert first[-1] < first[0]


def of_two_models(world: int) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """Two models with one weight, and this rank's inputs of three steps."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    second.weight = first.weight
    inputs = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    share = 4 // world
    return [first, second], [x[rank() * share : (rank() + 1) * share] for x in inputs]


def train_sharing(world: int, *, fails: bool = False) -> list[torch.Tensor]:
    """The weights, trained by ddp in a world of several; else by plain torch."""
    models, inputs = of_two_models(world)
    parameters = [*dict.fromkeys(p for model in models for p in model.parameters())]
    optimizer: Any = torch.optim.SGD(parameters, lr=0.1)
    run = accelerator()
    first, second = models
    if world > 1:
        if fails:
            refuse_wrapping(run, models, optimizer)
        first, second, optimizer = run.prepare(*models, optimizer)
    for x in inputs:
        run.backward(second(torch.tanh(first(x))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    run.end_training()
    return [parameter.detach().clone() for parameter in parameters]


def refuse_wrapping(run: Any, models: list[nn.Module], optimizer: Any) -> None:
    from accel_core.training import build

    attach, build.attach_contexts = build.attach_contexts, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.prepare(*models, optimizer)
    build.attach_contexts = attach


def train_after_a_failure(world: int) -> list[torch.Tensor]:
    return train_sharing(world, fails=True)


@pytest.mark.parametrize("train", [train_sharing, train_after_a_failure])
def test_two_models_with_one_weight_train_as_one_process_does(train: Any, run_processes) -> None:
    (expected,) = run_processes(train_sharing, 1, world=1)
    for found in run_processes(train, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def train_in_turns(world: int) -> list[torch.Tensor]:
    """The weights of two models with one weight, each with its optimizer and its steps."""
    models, inputs = of_two_models(world)
    run = accelerator()
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    prepared: list[Any] = [*models, *optimizers]
    if world > 1:
        prepared = run.prepare(*prepared)
    for number, x in enumerate(inputs):
        model, optimizer = prepared[number % 2], prepared[2 + number % 2]
        run.backward(model(x).square().mean())
        optimizer.step()
        for each in models:
            each.zero_grad()
    run.end_training()
    return [p.detach().clone() for model in models for p in model.parameters()]


def test_two_models_with_one_weight_train_in_turns(run_processes) -> None:
    (expected,) = run_processes(train_in_turns, 1, world=1)
    for found in run_processes(train_in_turns, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
