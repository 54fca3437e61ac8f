"""What a user does with DeepSpeed, each against plain PyTorch: all of them run in one pair of processes.

A scenario gives (with DeepSpeed, by hand), as lists of numbers.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from deepspeed_problem import (
    BATCH,
    Recipe,
    accelerator,
    adagrad,
    adamw,
    data,
    falling,
    loop,
    native,
    network,
    sgd,
    train,
    weights,
    whole_weights,
)
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accel_deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler

Pair = tuple[list[float], list[float]]


def whole_trajectory(stage: int) -> Pair:
    """Accumulation, a clip, a schedule, and a ragged last batch."""
    recipe = Recipe(accumulation=2, clip=0.1, schedule=True)
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage), gradient_accumulation_steps=2)
    return train(ours, recipe), native(recipe, ours.num_processes)


def nothing_clipped_unasked(stage: int) -> Pair:
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage))
    return train(ours, Recipe(), sgd), native(Recipe(), ours.num_processes, sgd)


def adagrad_by_the_rates_of_its_groups(stage: int) -> Pair:
    ours, recipe = accelerator(DeepSpeedPlugin(zero_stage=stage)), Recipe(schedule=True)
    return train(ours, recipe, adagrad), native(recipe, ours.num_processes, adagrad)


def clipped_by_the_config(stage: int) -> Pair:
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0.1))
    recipe = Recipe(clip=0.1)
    plain = native(recipe, ours.num_processes, sgd)
    size = len(weights(network()))
    return train(ours, Recipe(), sgd)[-size:], plain[-size:]


def prepared_in_several_calls(stage: int) -> Pair:
    ours, recipe = accelerator(DeepSpeedPlugin(zero_stage=stage)), Recipe(clip=0.1, schedule=True)
    model: Any = ours.prepare(network())
    loader = ours.prepare(DataLoader(data(), BATCH))
    optimizer = adamw(model.parameters())
    rate = falling(optimizer)
    optimizer, rate = ours.prepare(optimizer), ours.prepare(rate)
    return loop(ours, recipe, model, optimizer, rate, loader), native(recipe, ours.num_processes)


def dropped_gradients(stage: int) -> Pair:
    """zero_grad without a step; then two backwards for one."""
    ours, (model, optimizer), (plain, by_hand), x, y = _pair(stage)
    for _ in range(3):
        ours.backward(mse_loss(model(x * 5), y))
        optimizer.zero_grad()
        ours.backward(mse_loss(model(x), y))
        ours.backward(mse_loss(model(x + 1), y))
        (mse_loss(plain(x), y) + mse_loss(plain(x + 1), y)).backward()
        _step(optimizer, by_hand)
    return whole_weights(ours, model), weights(plain)


def the_head_alone(stage: int) -> Pair:
    """No optimizer has the other layers, which nobody froze."""
    ours, model, plain = accelerator(DeepSpeedPlugin(zero_stage=stage)), network(), network()
    by_hand, (x, y) = sgd(plain[3].parameters()), data()[0:8]
    head = model[3]
    model, optimizer = ours.prepare(model, sgd(head.parameters()))
    for _ in range(3):
        ours.backward(mse_loss(model(x), y))
        mse_loss(plain(x), y).backward()
        if stage:
            ours.clip_grad_norm_(head.parameters(), 0.1)
            nn.utils.clip_grad_norm_(plain[3].parameters(), 0.1)
        _step(optimizer, by_hand)
    return whole_weights(ours, model), weights(plain)


def clipped_by_value(stage: int) -> Pair:
    ours, (model, optimizer), (plain, by_hand), x, y = _pair(stage)
    for _ in range(3):
        ours.backward(mse_loss(model(x), y))
        ours.clip_grad_value_(model.parameters(), 0.01)
        mse_loss(plain(x), y).backward()
        nn.utils.clip_grad_value_(plain.parameters(), 0.01)
        _step(optimizer, by_hand)
    return whole_weights(ours, model), weights(plain)


def sums_over_items(stage: int) -> Pair:
    ours, (model, optimizer), (plain, by_hand), x, y = _pair(stage, gradient_accumulation_steps=2)
    for window in ours.windows([3, 5, 3, 5], model, items=float):
        for items in window:
            ours.backward(mse_loss(model(x[:items]), y[:items], reduction="sum"))
            optimizer.step()
            optimizer.zero_grad()
            mse_loss(plain(x[:items]), y[:items], reduction="sum").div(8).backward()
        _step(by_hand)
    return whole_weights(ours, model), weights(plain)


def sums_over_items_of_whole_windows(stage: int) -> Pair:
    ours, (model, optimizer), (plain, by_hand), x, y = _pair(stage)

    def loss_of(model: nn.Module, items: int) -> tuple[torch.Tensor, None]:
        return mse_loss(model(x[:items]), y[:items], reduction="sum"), None

    for window in ours.windows([3, 5, 3, 5], model, items=float, size=2):
        ours.forward_backward(model, window, loss_of)
        ours.clip_grad_norm_(model.parameters(), 0.1)
        for items in (3, 5):
            loss_of(plain, items)[0].div(8).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        _step(optimizer, by_hand)
    return whole_weights(ours, model), weights(plain)


def inference_only(stage: int) -> Pair:
    ours, model, x = accelerator(DeepSpeedPlugin(zero_stage=stage)), network(), data()[0:8][0]
    with torch.no_grad():
        expected = model(x).flatten().tolist()
        return ours.prepare(model)(x).flatten().tolist(), expected


def student_and_teacher(stage: int) -> Pair:
    ours, (model, optimizer), (plain, by_hand), x, _ = _pair(stage)
    teacher, by_hand_teacher = ours.prepare(network(5)), network(5)
    for _ in range(3):
        with torch.no_grad():
            target, plain_target = teacher(x), by_hand_teacher(x)
        ours.backward(mse_loss(model(x), target))
        mse_loss(plain(x), plain_target).backward()
        _step(optimizer, by_hand)
    return whole_weights(ours, model), weights(plain)


def through_a_frozen_model_and_by_two_outputs(stage: int) -> Pair:
    """One backward that begins at two outputs, one of them behind a model that is not trained."""
    ours, (model, optimizer), (plain, by_hand), x, y = _pair(stage)
    judge, by_hand_judge = (network(5).requires_grad_(requires_grad=False) for _ in range(2))
    judge = ours.prepare(judge)
    for _ in range(3):
        ours.backward(judge(model(x).repeat(1, 2)).square().mean() + mse_loss(model(x + 1), y))
        (by_hand_judge(plain(x).repeat(1, 2)).square().mean() + mse_loss(plain(x + 1), y)).backward()
        _step(optimizer, by_hand)
    return whole_weights(ours, model), weights(plain)


def rate_and_optimizer_from_json(stage: int) -> Pair:
    warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        hf_ds_config={
            "zero_optimization": {"stage": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": warmup | {"warmup_type": "linear"}},
        },
    )
    ours, model, x, y = accelerator(plugin), network(), *data()[0:8]
    dummy = DummyOptim(model.parameters(), lr=0.04, betas=(0.8, 0.99))
    model, optimizer, rate = ours.prepare(model, dummy, DummyScheduler(dummy, warmup_num_steps=4))
    rates = []
    for _ in range(6):
        ours.backward(mse_loss(model(x), y))
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        rates.append(rate.get_last_lr()[0])
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    return rates, [0.0, 0.01, 0.02, 0.03, 0.04, 0.04]  # DeepSpeed's warmup begins with step 0


def _pair(stage: int, **more: Any) -> tuple[Any, tuple[Any, Any], tuple[Any, Any], Any, Any]:
    ours, model, plain = accelerator(DeepSpeedPlugin(zero_stage=stage), **more), network(), network()
    return (
        ours,
        ours.prepare(model, sgd(model.parameters())),
        (plain, sgd(plain.parameters())),
        *data()[0:8],
    )


def _step(*optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


SCENARIOS = [
    whole_trajectory,
    nothing_clipped_unasked,
    adagrad_by_the_rates_of_its_groups,
    clipped_by_the_config,
    prepared_in_several_calls,
    dropped_gradients,
    the_head_alone,
    clipped_by_value,
    sums_over_items,
    sums_over_items_of_whole_windows,
    inference_only,
    student_and_teacher,
    through_a_frozen_model_and_by_two_outputs,
    rate_and_optimizer_from_json,
]


def run_all(stage: int) -> dict[str, Pair | str]:
    """Each scenario in a run of its own, one after the other: what a run leaves behind, the next meets."""
    from accel_core.contract.run import live

    found: dict[str, Pair | str] = {}
    for scenario in SCENARIOS:
        try:
            found[scenario.__name__] = scenario(stage)
        except Exception:  # of any kind: one scenario's failure is its row, the others still run
            found[scenario.__name__] = traceback.format_exc()
        for run in live():
            run.end()
    return found
