"""Token losses over ragged sequences: 1 x 8 = 2 x 4 = 2 x 2 accumulating 2, and a window's traffic."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import token_losses
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_core import (
    Accelerator,
    AccelError,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from accel_testing.patience import patience

pytestmark = pytest.mark.needs("accel-ddp")


def accelerator(*handlers: Any, **options: Any) -> Accelerator:
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(20)))
    return Accelerator(cpu=True, kwargs_handlers=[limit, *handlers], **options)


def trained(
    accumulate,
    clip=None,
    lengths=tuple(token_losses.LENGTHS),
    each_batch=False,
    dtype=torch.float32,
    **options,
):
    plugin = GradientAccumulationPlugin(num_steps=accumulate, sync_each_batch=each_batch)
    made = accelerator(GradScalerKwargs(init_scale=32.0), gradient_accumulation_plugin=plugin, **options)
    weights = token_losses.ours(made, clip, lengths, dtype=dtype)
    made.end_training()
    return weights


def assert_all_near(found, plain, **tolerance):
    for weights in found:
        for mine, theirs in zip(weights, plain, strict=True):
            torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))


def exact(accumulate, clip):
    return trained(accumulate, clip, dtype=torch.float64)


EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, None), (2, 0.05)])
def test_the_tokens_of_the_global_window_decide_not_who_has_them(accumulate, clip, world, run_processes):
    found = run_processes(exact, accumulate, clip, world=world)

    assert_all_near(found, token_losses.plain(clip, dtype=torch.float64), **EXACT)


def by_windows():
    made = accelerator(gradient_accumulation_steps=2)
    found = token_losses.by_windows(made)
    made.end_training()
    return found


def test_so_they_do_in_windows_that_are_run_as_a_whole(run_processes):
    found = run_processes(by_windows)
    assert_all_near([weights for weights, _ in found], token_losses.plain())
    for _, losses in found:
        assert losses == pytest.approx(token_losses.plain_losses())


def test_reducing_each_micro_batch_changes_nothing(run_processes):
    assert_all_near(run_processes(trained, 2, None, tuple(token_losses.LENGTHS), True), token_losses.plain())


def test_a_rank_without_a_token_takes_part(run_processes):
    lengths = (0, 0, 0, 0, 5, 2, 9, 1) * 2
    assert_all_near(run_processes(trained, 2, None, lengths), token_losses.plain(lengths=lengths))


def half(accumulate, clip):
    return trained(accumulate, clip, mixed_precision="fp16")


def test_a_loss_scale_changes_nothing(run_processes):
    assert_all_near(run_processes(half, 2, 0.05), token_losses.plain(0.05), rtol=2e-2, atol=2e-2)


def traffic(accumulate, each_batch):
    """The collectives of each of four micro-batches, from entering `accumulate` to the end of its step."""
    plugin = GradientAccumulationPlugin(num_steps=accumulate, sync_each_batch=each_batch)
    made = accelerator(gradient_accumulation_plugin=plugin)
    network = token_losses.model()
    network, optimizer = made.prepare(network, token_losses.optimizer_of(network))
    inputs, labels = token_losses.padded(token_losses.sequences()[:4])
    counts = []
    for _ in range(8):
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
            made.accumulate(network),
        ):
            made.backward(token_losses.loss_sum(network(inputs), labels))
            made.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        counts.append(sum(event.name.startswith("c10d::") for event in profile.events()))
    made.end_training()
    return counts[4:]  # after its first reduction the wrapper agrees on its buckets, once


def test_micro_batches_inside_a_window_communicate_nothing(run_processes):
    for counts in run_processes(traffic, 2, False):
        assert counts == [0, 1] * 2


def test_each_micro_batch_communicates_if_asked_to(run_processes):
    for counts in run_processes(traffic, 2, True):
        assert counts == [1] * 4


def refused(train):
    made = accelerator()
    model = torch.nn.Linear(1, 1)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        train(made, model, optimizer)
    except AccelError as error:
        return str(error)
    finally:
        made.end_training()


def in_joined(made, model, optimizer):
    with made.join_uneven_inputs([model]):
        next(made.windows([torch.ones(1, 1)] * (2 + made.process_index), items=len))


def test_items_are_refused_where_ranks_may_run_out_of_batches(run_processes):
    """One rank would add up its items with what another sends in the strategy's place."""
    for told in run_processes(refused, in_joined):
        assert "a rank may have run" in told


def of_different_lengths(made, model, optimizer):
    for window in made.windows([torch.ones(1, 1)] * (3 + made.process_index), model, size=2):
        for x in window:
            made.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()


def test_ranks_with_different_numbers_of_batches_all_raise_and_name_them(run_processes):
    for told in run_processes(refused, of_different_lengths):
        assert "different numbers of batches of the list: rank 0 has 1, rank 1 has 2" in told


def without_the_last_backward(made, model, optimizer):
    for window in made.windows([torch.ones(1, 1)] * 2, model, size=2):
        for number, x in enumerate(window):
            loss = model(x).sum()
            if number == 0:
                made.backward(loss)  # the next is skipped, as programs do with a loss that is nan
            optimizer.step()


def test_a_window_whose_reducing_backward_did_not_come_is_an_error(run_processes):
    for told in run_processes(refused, without_the_last_backward):
        assert "are not reduced: its window ends here" in told
        assert "on all ranks alike" in told


def a_parameter_that_comes_late():
    made = accelerator()
    model = torch.nn.Linear(1, 1)
    _, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.scale = torch.nn.Parameter(torch.ones(1))
    try:
        optimizer.add_param_group({"params": [model.scale]})
    except AccelError as error:
        return str(error), len(optimizer.param_groups)
    finally:
        made.end_training()


def test_a_parameter_whose_gradient_would_not_be_reduced_is_refused(run_processes):
    for told, groups in run_processes(a_parameter_that_comes_late):
        assert "its gradient would not be reduced" in told
        assert groups == 1


def gathered(size, dispatches):
    config = DataLoaderConfiguration(dispatch_batches=dispatches)
    made = accelerator(dataloader_config=config)
    loader = made.prepare(DataLoader(torch.arange(10.0), 2))
    found = [
        made.gather_for_metrics(x) for window in made.windows(loader, items=len, size=size) for x in window
    ]
    made.end_training()
    return sorted(torch.cat(found).tolist())


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("size", "dispatches"), [(3, False), (4, False), (4, True)])
def test_metrics_have_each_sample_once(size, dispatches, world, run_processes):
    assert run_processes(gathered, size, dispatches, world=world) == [list(range(10))] * world


def epoch_of(folder, *, saves_after=None, loads=False):
    """The losses of an epoch of windows of two, from where a save has left it; None: of all of it."""
    config = DataLoaderConfiguration(data_seed=3)
    made = accelerator(dataloader_config=config, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.linspace(-1, 1, 28)[:, None]), 2, shuffle=True)
    model, optimizer, loader = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    if loads:
        made.load_state(str(folder))
    losses = []
    for number, window in enumerate(made.windows(loader, model, items=lambda batch: len(batch[0])), 1):
        for (x,) in window:
            loss = (model(x) - x.sin()).square().sum()
            made.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if made.sync_gradients and number == saves_after:
                made.save_state(str(folder))
        if number == saves_after:
            break
    made.end_training()
    return losses


def resumed(folder, number):
    return epoch_of(folder, saves_after=number) + epoch_of(folder, loads=True)


@pytest.mark.parametrize("number", [1, 3])
def test_a_run_that_is_saved_at_the_end_of_a_window_goes_on_with_the_same_losses(
    number, tmp_path, run_processes
):
    whole = run_processes(epoch_of, tmp_path)

    assert [len(losses) for losses in whole] == [7, 7]
    assert run_processes(resumed, tmp_path, number) == whole
