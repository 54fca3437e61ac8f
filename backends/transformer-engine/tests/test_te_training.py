"""Training in float8: all weights move, and the numbers are Transformer Engine's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from te_problem import (
    CONVERTED,
    accelerator,
    batches,
    by_hand,
    loss_of,
    model,
    train,
    train_in_windows,
    weights,
)
from torch import nn
from torch.utils import checkpoint
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import quantization

from accel_core import AccelError
from accel_transformer_engine.scaling import collect

RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}


def trained(strategy: str | None, recipe: str) -> tuple[list[float], Any]:
    run = accelerator(strategy, recipe=recipe)
    losses, net, _ = train(run)
    found = losses, weights(run, net)
    run.end_training()
    return found


def assert_unequal(before: Any, after: Any) -> None:
    assert [name for name, value in after.items() if torch.equal(value, before[name])] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_and_weights_are_those_of_the_loop_by_hand(recipe: str) -> None:
    losses, after = trained(None, recipe)
    expected, by_library = by_hand(RECIPES[recipe]())
    assert losses == expected
    assert [name for name in by_library if not torch.equal(after[name], by_library[name])] == []
    assert_unequal(model().state_dict(), after)
    assert after.keys() == model().state_dict().keys()


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_one_forward_is_more_than_a_thousandth_from_float32_and_from_bfloat16() -> None:
    run = accelerator(in_evaluation=True, norms=False)
    net = run.prepare(model())
    ids = batches(1)[0][:, :-1]
    with torch.no_grad():
        float8, float32 = net(ids).float(), model()(ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            bfloat16 = model()(ids).float()
    run.end_training()
    assert (float8 - float32).abs().max() > 1e-3
    assert (float8 - bfloat16).abs().max() > 1e-3


@pytest.mark.parametrize(("recipe", "keeps"), [("delayed", True), ("current", True), ("current", False)])
def test_a_window_keeps_its_float8_weights(recipe: str, keeps: bool) -> None:
    """As a loop by hand that says which micro-batch is first; current scaling has the same numbers anyway."""
    run = accelerator(recipe=recipe)
    run.gradient_accumulation_steps = 2
    net = model()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    losses, kept = [], []
    for ids in batches():
        for part in ids.chunk(2):
            with run.accumulate(net):
                loss = loss_of(net, part)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            kept.append(net.block.up._fp8_workspaces["weight"])
    expected, by_library = by_hand(RECIPES[recipe](), window=2, keeps=keeps)
    after = weights(run, net)
    run.end_training()
    assert losses == expected
    assert [name for name in by_library if not torch.equal(after[name], by_library[name])] == []
    assert all(workspace is kept[0] for workspace in kept)


def test_a_weight_that_is_edited_within_a_window_is_rounded_anew() -> None:
    run = accelerator(recipe="current")
    run.gradient_accumulation_steps = 2
    net = run.prepare(model())
    ids = batches(1)[0][:, :-1]
    with run.accumulate(net):
        net(ids).sum().backward()
    with run.accumulate(net):
        before = net(ids)
        with torch.no_grad():
            net.block.up.weight.mul_(4)
        edited = net(ids)
    run.end_training()
    assert not torch.equal(before, edited)


@pytest.mark.parametrize("in_evaluation", [True, False])
def test_evaluation_is_in_float8_if_asked(in_evaluation: bool) -> None:
    run = accelerator(in_evaluation=in_evaluation, recipe="current")
    net = run.prepare(model())
    ids = batches(1)[0][:, :-1]
    with torch.no_grad():
        training, evaluation = net(ids), net.eval()(ids)
    run.end_training()
    assert torch.equal(training, evaluation) == in_evaluation


def trained_beside_the_hand(strategy: str, recipe: str) -> Any:
    """What the run gives, and what the loop by hand gives that divides the model likewise."""
    run = accelerator(strategy, recipe=recipe)
    losses, net, _ = train(run)
    found = losses, weights(run, net)
    by_library = by_hand(RECIPES[recipe](), shards=strategy == "fsdp")
    run.end_training()
    return found, by_library


@pytest.mark.needs("accel-ddp", "accel-fsdp")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_weights_train_in_parts_as_by_hand(strategy: str, recipe: str, run_processes) -> None:
    for (losses, after), (expected, by_library) in run_processes(
        trained_beside_the_hand, strategy, recipe, world=2, timeout=200
    ):
        assert losses == expected
        assert_unequal(model().state_dict(), after)
        assert {*CONVERTED} <= after.keys()
        assert [name for name in by_library if not torch.equal(after[name], by_library[name])] == []


def test_a_run_leaves_nothing_to_be_reduced_by_later_ones() -> None:
    run = accelerator(recipe="delayed")
    train(run, steps=1)
    state = quantization.FP8GlobalStateManager.quantization_state
    held = len(state.global_amax_buffer)
    run.end_training()
    assert held - len(state.global_amax_buffer) == 2


class Recomputed(nn.Module):
    """A layer that is computed again in the backward, by torch's function or the library's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.layer = how, nn.Linear(16, 16)

    def forward(self, x):
        if self.how == "torch":
            return checkpoint.checkpoint(self.layer, x, use_reentrant=False)
        return te.checkpoint(self.layer, x) if self.how == "library" else self.layer(x)


def gradients(how: str) -> list[torch.Tensor]:
    run = accelerator(recipe="delayed")
    net = run.prepare(Recomputed(how))
    x = torch.linspace(-1, 1, 256).view(16, 16)
    for _ in range(2):  # the second with scales of the first
        run.backward(net(x.requires_grad_()).square().sum())
    found = [parameter.grad.clone() for parameter in net.parameters()]
    run.end_training()
    return found


def test_the_librarys_own_checkpoint_gives_the_same_gradients() -> None:
    for one, other in zip(gradients("library"), gradients("not"), strict=True):
        assert torch.equal(one, other)


def trained_with_few_activations(recompute: bool, strategy: str | None) -> tuple[list[float], Any, Any]:
    """Losses, weights, scales and histories.

    A history of three steps shows each update that is one too many.
    """
    blocks = {"transformer_cls_names_to_wrap": ["Block"], "activation_checkpointing": recompute}
    plugins = []
    if strategy == "fsdp":
        from accel_fsdp import FullyShardedDataParallelPlugin

        plugins = [FullyShardedDataParallelPlugin(**blocks)]
    run = accelerator(strategy, *plugins, recipe="delayed", amax_history_len=3)
    net = model()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    (unit,) = run.run.units
    if recompute and not plugins:
        net.block.forward = partial(unit.hooks.checkpoint_function(unit), net.block.forward)
    losses = train_in_windows(run, net, optimizer, steps=4)
    state = {name: entry.value for name, entry in collect(unit).items()}
    assert state
    found = losses, weights(run, net), state
    run.end_training()
    return found


def assert_recomputation_changes_nothing(again: Any, kept: Any) -> None:
    assert again[0] == kept[0]
    for twice, once in zip(again[1:], kept[1:], strict=True):
        torch.testing.assert_close(twice, once, rtol=0, atol=0)


def test_blocks_computed_again_change_no_loss_weight_scale_or_history() -> None:
    """The library's function by hand shortens the histories: each block computed again adds a row to all."""
    again, kept = trained_with_few_activations(True, None), trained_with_few_activations(False, None)
    assert_recomputation_changes_nothing(again, kept)


def in_parts(recompute: bool) -> tuple[list[float], Any, Any]:
    return trained_with_few_activations(recompute, "fsdp")


@pytest.mark.needs("accel-fsdp")
@pytest.mark.timeout(300)
def test_fsdp_computes_blocks_again_and_changes_no_loss_weight_scale_or_history(run_processes) -> None:
    ranks = [run_processes(in_parts, recompute, world=2, timeout=200) for recompute in (True, False)]
    for again, kept in zip(*ranks, strict=True):
        assert_recomputation_changes_nothing(again, kept)


@pytest.mark.parametrize("trains", [True, False])
def test_a_first_layer_whose_input_needs_no_gradient_is_computed_again(trains: bool) -> None:
    """The library's function alone fails there in backward: list index out of range."""
    run = accelerator(recipe="current")
    layer = nn.Linear(16, 16).requires_grad_(trains)
    net = run.prepare(nn.Sequential(layer, nn.Linear(16, 16)))
    x = torch.linspace(-1, 1, 256).view(16, 16)
    found = []
    for forward in (net, partial(te.checkpoint, net, use_reentrant=False)):
        run.backward(forward(x).square().sum())
        found.append([parameter.grad for parameter in net.parameters() if parameter.grad is not None])
        net.zero_grad()
    run.end_training()
    assert len(found[0]) == (4 if trains else 2)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_torchs_checkpoint_would_recompute_in_another_precision_and_is_refused() -> None:
    with pytest.raises(AccelError, match=r"layer layer was computed in float8.*\n.*pytorch.checkpoint"):
        gradients("torch")
