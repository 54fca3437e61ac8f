"""A rank that has a batch more than others is told so, where it would wait for them for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_problem import accelerator, net
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_core import (
    Accelerator,
    AccelError,
    ConfigError,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    LocalSGD,
)

BATCHES = 5


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter((torch.full((6,), float(number)),) for number in range(2 * BATCHES))


def made(model: nn.Module, *, stream: bool = False, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    """With two ranks, rank 0 reads three batches of two samples, rank 1 two."""
    accumulation = options.pop("gradient_accumulation_plugin", None)
    configuration = DataLoaderConfiguration(even_batches=False, **options)
    run = accelerator(configuration, gradient_accumulation_plugin=accumulation)
    dataset = Stream() if stream else TensorDataset(torch.randn(2 * BATCHES, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return run, *run.prepare(model, optimizer, DataLoader(dataset, batch_size=2))


def trained(run: Accelerator, model: Any, optimizer: Any, loader: Any) -> tuple[int, str]:
    """(batches trained on, what was raised in the next)."""
    done = 0
    try:
        for (x,) in loader:
            with run.accumulate(model):
                run.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            done += 1
    except AccelError as error:
        return done, str(error)
    return done, ""


def training(options: dict[str, Any], normalized: bool) -> tuple[int, str]:
    model = net() if normalized else nn.Linear(6, 1)
    run, *parts = made(model, **options)
    found = trained(run, *parts)
    run.end_training()
    return found


@pytest.mark.parametrize("normalized", [False, True], ids=["linear", "batch norm"])
@pytest.mark.parametrize(
    "options",
    [{}, {"stream": True}, {"stream": True, "dispatch_batches": False}, {"dispatch_batches": True}],
    ids=["map-style", "dispatched stream", "stream", "dispatched"],
)
def test_training_on_a_batch_that_others_lack_is_refused(
    options: dict[str, Any], normalized: bool, run_processes
) -> None:
    (trained, told), other = run_processes(training, options, normalized)

    assert trained == 2
    assert told.startswith("forward in batch 3 of epoch 0 of the dataloader of ")
    assert "not all of 2 readers have this batch (data.even_batches is off)" in told
    assert told.splitlines()[-1].startswith("train inside `with accelerator.join_uneven_inputs([model]):`")
    assert other == (2, "")


def loss_of_an_eval_model() -> tuple[int, str]:
    run, model, optimizer, loader = made(nn.Linear(6, 1))
    model.eval()
    found = trained(run, model, optimizer, loader)
    run.end_training()
    return found


def test_a_model_in_evaluation_mode_is_refused_in_backward(run_processes) -> None:
    (trained, told), other = run_processes(loss_of_an_eval_model)

    assert (trained, told.partition(" of ")[0]) == (2, "backward in batch 3")
    assert other == (2, "")


def legal(how: str) -> int:
    run, model, optimizer, loader = made(net() if how == "no_grad" else nn.Linear(6, 1))
    seen = 0
    if how == "joined":
        with run.join_uneven_inputs([model]):
            return trained(run, model, optimizer, loader)[0]
    for (x,) in loader:
        seen += 1
        if how == "no_grad":
            with torch.no_grad():
                model(x)
        elif how == "eval":
            model.eval()(x)
        elif how == "no_sync":
            with run.no_sync(model):
                run.backward(model(x).mean())
        elif how == "break" and seen > 2:
            break
        else:
            run.backward(model(x).mean())
    run.end_training()
    return seen


@pytest.mark.parametrize("how", ["joined", "no_grad", "eval", "no_sync", "break"])
def test_what_waits_for_nobody_is_left_alone(how: str, run_processes) -> None:
    assert run_processes(legal, how) == [3, 2]


def told_of_local_sgd() -> str:
    run, model, *_ = made(nn.Linear(6, 1))
    with pytest.raises(ConfigError) as told:
        LocalSGD(run, model, 2)
    run.end_training()
    return str(told.value)


def test_local_sgd_of_ranks_with_other_numbers_of_steps_is_refused(run_processes) -> None:
    for told in run_processes(told_of_local_sgd):
        assert told.startswith("LocalSGD: data.even_batches is off, so ranks may have fewer steps")


def told_of_items() -> str:
    run, model, _, loader = made(nn.Linear(6, 1))
    with run.join_uneven_inputs([model]), pytest.raises(AccelError) as told:
        next(run.windows(loader, model, items=lambda batch: len(batch[0])))
    run.end_training()
    return str(told.value)


def test_items_where_ranks_run_out_of_batches_are_refused(run_processes) -> None:
    for told in run_processes(told_of_items):
        assert "inside join_uneven_inputs" in told


def in_a_window(size: int, each: bool = False) -> tuple[int, str, list[float]]:
    options = GradientAccumulationPlugin(num_steps=size, sync_each_batch=each)
    run, *parts = made(nn.Linear(6, 1), gradient_accumulation_plugin=options)
    found = trained(run, *parts)
    weights = [value for p in parts[0].parameters() for value in p.detach().flatten().tolist()]
    run.end_training()
    return *found, weights


def test_a_window_that_all_have_begun_is_ended_by_each_with_its_last_batch(run_processes) -> None:
    (_, told, weights), other = run_processes(in_a_window, 3)

    assert told == ""
    assert other == (2, "", weights)


@pytest.mark.parametrize(("size", "each"), [(2, False), (3, True)], ids=["a window more", "a reduction more"])
def test_what_others_do_not_reduce_is_refused(size: int, each: bool, run_processes) -> None:
    (trained, told, _), _ = run_processes(in_a_window, size, each)

    assert (trained, told.partition(" of ")[0]) == (2, "forward in batch 3")


def evaluating_in_between() -> tuple[int, str, int]:
    run, model, _, loader = made(nn.Linear(6, 1))
    evaluation = run.prepare(DataLoader(TensorDataset(torch.randn(4, 6)), batch_size=2))
    told, done = "", 0
    for (x,) in loader:
        done += 1
        for (inner,) in evaluation:  # every rank has one: not the batch that is refused
            model(inner)
        try:
            run.backward(model(x).mean())
        except AccelError as error:
            told = str(error)
    hooks = len(model._forward_pre_hooks)
    run.end_training()
    return done, told.partition(" of ")[0], hooks


def test_a_loop_inside_has_batches_of_its_own(run_processes) -> None:
    assert run_processes(evaluating_in_between) == [(3, "forward in batch 3", 0), (2, "", 0)]
