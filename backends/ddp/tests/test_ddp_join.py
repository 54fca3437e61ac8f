"""Ranks may run out of batches at different times."""

from __future__ import annotations

import warnings

import pytest
import torch
from ddp_problem import accelerator, batches, equal, net, plain_group, weights
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from accel_core import AccelError
from accel_testing.processes import ProcessError


def plain_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)  # without batch norm: its buffers are not part of what Join promises
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def joined(counts: list[int], accumulate: int) -> dict[str, torch.Tensor]:
    run = accelerator(gradient_accumulation_steps=accumulate)
    model = plain_net(run.process_index)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with run.join_uneven_inputs([model]):
        for x, y in batches(counts[run.process_index], run.process_index):
            with run.accumulate(model):
                run.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    result = weights(run.unwrap_model(model))
    run.end_training()
    return result


def plainly_joined(counts: list[int], accumulate: int) -> dict[str, torch.Tensor]:
    with plain_group() as rank:
        model = DistributedDataParallel(plain_net(rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model]):
            for number, (x, y) in enumerate(batches(counts[rank], rank), 1):
                model.require_backward_grad_sync = number % accumulate == 0
                (F.mse_loss(model(x), y) / accumulate).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        result = weights(model.module)
        model.reducer = model.logger = None
    return result


@pytest.mark.parametrize(("counts", "accumulate"), [([3, 5], 1), ([5, 3], 1), ([0, 4], 1), ([4, 6], 2)])
@pytest.mark.by_default
def test_uneven_ranks_train_as_under_torchs_join_and_end_alike(
    counts: list[int], accumulate: int, run_processes
) -> None:
    ours = run_processes(joined, counts, accumulate)
    plain = run_processes(plainly_joined, counts, accumulate)

    assert equal(ours[0], plain[0])
    assert equal(ours[1], plain[1])
    assert equal(ours[0], ours[1])


def evaluated(counts: list[int], with_buffers: bool, when: str) -> dict[str, torch.Tensor]:
    run = accelerator()
    model = net() if with_buffers else plain_net(0)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def evaluate(x: torch.Tensor) -> None:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()

    with run.join_uneven_inputs([model]):
        for x, y in batches(counts[run.process_index], run.process_index):
            if when == "before" or (when == "on one rank" and run.process_index == 1):
                evaluate(x)
            loss = F.mse_loss(model(x), y)
            if when == "between":
                evaluate(x)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if when == "at the end":
            evaluate(torch.ones(8, 6))
    result = weights(run.unwrap_model(model))
    run.end_training()
    return result


@pytest.mark.parametrize("when", ["before", "between", "on one rank", "at the end"])
@pytest.mark.parametrize("counts", [[3, 5], [0, 2]])
@pytest.mark.parametrize("with_buffers", [False, True])
@pytest.mark.by_default
def test_evaluation_in_the_loop_leaves_training_as_it_was(
    with_buffers: bool, counts: list[int], when: str, run_processes
) -> None:
    alone = run_processes(evaluated, counts, with_buffers, "never")
    beside = run_processes(evaluated, counts, with_buffers, when)

    assert equal(beside[0], beside[1])
    assert equal(beside[0], alone[0])


def short_windows() -> None:
    run = accelerator(gradient_accumulation_steps=2)
    model = plain_net(0)
    dataset = torch.utils.data.TensorDataset(torch.randn(10, 6))
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with run.join_uneven_inputs([model]):
        for (x,) in loader:
            with run.accumulate(model):
                run.backward(model(x).mean())
                optimizer.step()


def test_a_rank_that_ends_in_the_midst_of_a_window_is_told_instead_of_waiting_for_ever(run_processes) -> None:
    with pytest.raises(ProcessError) as caught:
        run_processes(short_windows)

    assert caught.value.kind == AccelError.__name__
    assert "this rank's batches end after 1 of the 2 micro-batches of a window" in caught.value.text
    assert "set gradient_accumulation_steps: 1" in caught.value.text


def what_join_leaves() -> tuple[bool, bool, list[str]]:
    run = accelerator()
    model = plain_net(0)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = list(warnings.filters)
    with run.join_uneven_inputs([model]):
        for _ in range(3):  # torch arranges its buckets anew in the second
            model(torch.zeros(2, 6)).mean().backward()
    hooks = len(model._forward_pre_hooks)
    # As many forwards as each rank likes: none may ask the others any more.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(run.process_index):
            model(torch.zeros(2, 6))
    started = [event.name for event in profile.events() if event.name.startswith("c10d::")]
    run.end_training()
    return warnings.filters == before, hooks == 0, started


def test_after_the_context_nothing_of_it_is_left(run_processes) -> None:
    assert run_processes(what_join_leaves) == [(True, True, [])] * 2


def an_error_in_the_body() -> str:
    run = accelerator()
    model = run.prepare(net())
    try:
        with run.join_uneven_inputs([model]):
            raise KeyError("mine")
    except KeyError as error:
        run.end_training()
        return str(error)
    return "lost"


def test_an_exception_in_the_body_comes_out_as_it_was(run_processes) -> None:
    assert run_processes(an_error_in_the_body) == ["'mine'"] * 2
