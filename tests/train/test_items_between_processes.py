"""Token losses over ragged sequences: 1 x 8 = 2 x 4 = 2 x 2 accumulating 2, and a window's traffic."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import token_losses
import torch

from accel_core import (
    Accelerator,
    AccelError,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from accel_testing.patience import patience

pytestmark = pytest.mark.needs("accel-ddp")


def accelerator(*handlers: Any, **options: Any) -> Accelerator:
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(20)))
    return Accelerator(cpu=True, kwargs_handlers=[limit, *handlers], **options)


def trained(accumulate, clip=None, lengths=tuple(token_losses.LENGTHS), each_batch=False, **options):
    plugin = GradientAccumulationPlugin(num_steps=accumulate, sync_each_batch=each_batch)
    made = accelerator(GradScalerKwargs(init_scale=32.0), gradient_accumulation_plugin=plugin, **options)
    weights = token_losses.ours(made, clip, lengths)
    made.end_training()
    return weights


def assert_all_near(found, plain, **tolerance):
    for weights in found:
        for mine, theirs in zip(weights, plain, strict=True):
            torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, None), (4, None), (2, 0.05)])
def test_the_tokens_of_the_global_window_decide_not_who_has_them(accumulate, clip, run_processes):
    found = run_processes(trained, accumulate, clip)
    assert_all_near(found, token_losses.plain(clip))


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


def traffic(accumulate, each_batch, count_items):
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
            made.accumulate(network, items=4 if count_items else None),
        ):
            made.backward(token_losses.loss_sum(network(inputs), labels))
            made.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        counts.append(sum(event.name.startswith("c10d::") for event in profile.events()))
    made.end_training()
    return counts[4:]  # after its first reduction the wrapper agrees on its buckets, once


@pytest.mark.parametrize("count_items", [False, True])
def test_micro_batches_inside_a_window_communicate_nothing(count_items, run_processes):
    for counts in run_processes(traffic, 2, False, count_items):
        assert counts == [0, 1 + count_items] * 2


def test_each_micro_batch_communicates_if_asked_to(run_processes):
    for counts in run_processes(traffic, 2, True, False):
        assert counts == [1] * 4


class WithoutFloat64:
    """Hooks of a unit on a chip that lacks float64, as some of a card's chips may."""

    def __init__(self, hooks):
        self.hooks = hooks

    def __getattr__(self, name):
        return getattr(self.hooks, name)

    def capabilities(self, device):
        return self.hooks.capabilities(device) - {"float64"}


def chips_of_two_kinds(lacking):
    made = accelerator()
    model = torch.nn.Linear(1, 1)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    unit = made.run.units[0]
    if made.process_index == lacking:
        unit.hooks = WithoutFloat64(unit.hooks)
    counts = []
    for window in range(2):
        with made.accumulate(model, items=3 + window + made.process_index):
            made.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
        counts.append((str(unit.step_state.items.dtype), unit.step_state.items.item()))
    made.end_training()
    return counts


@pytest.mark.parametrize("lacking", [0, 1])
def test_chips_of_which_one_lacks_float64_count_alike(lacking, run_processes):
    assert (
        run_processes(chips_of_two_kinds, lacking) == [[("torch.float32", 7.0), ("torch.float32", 9.0)]] * 2
    )


def items_where_ranks_run_out_of_batches(whole):
    made = accelerator()
    model = torch.nn.Linear(1, 1)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(1, 1)
    try:
        with made.join_uneven_inputs([model]):
            for _ in range(2 + made.process_index):
                if whole:
                    made.forward_backward(model, [x], lambda model, x: (model(x).sum(), None), items=1)
                else:
                    with made.accumulate(model, items=1):
                        made.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
    except AccelError as error:
        return str(error)
    finally:
        made.end_training()


@pytest.mark.parametrize("whole", [False, True])
def test_items_are_refused_where_ranks_may_run_out_of_batches(whole, run_processes):
    """One rank would add up its items with what another sends in the strategy's place."""
    for told in run_processes(items_where_ranks_run_out_of_batches, whole):
        assert "a rank that has run out of batches has no items to add" in told


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
