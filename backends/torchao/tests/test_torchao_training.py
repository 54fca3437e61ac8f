"""Training in float8: all weights move, and the numbers are torchao's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from float8_problem import CONVERTED, accelerator, batches, by_hand, loss_of, model, train, weights

WAYS = [(None, False, 1), ("ddp", False, 2), ("fsdp", False, 2), ("fsdp", True, 2)]


def trained(strategy: str | None, gathers: bool, recipe: str) -> tuple[list[float], Any]:
    run = accelerator(strategy, recipe=recipe, all_gather=gathers)
    losses, net, _ = train(run)
    found = losses, weights(run, net)
    run.end_training()
    return found


def assert_unequal(before: Any, after: Any) -> None:
    unmoved = [name for name, value in after.items() if torch.equal(value, before[name])]
    assert unmoved == []


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_losses_and_weights_are_those_of_the_loop_by_hand(recipe: str) -> None:
    losses, after = trained(None, gathers=False, recipe=recipe)
    expected, by_library = by_hand(recipe)
    assert losses == expected
    assert [name for name, value in after.items() if not torch.equal(value, by_library[name])] == []
    assert_unequal(model().state_dict(), after)
    plain = loss_of(model(), batches(1)[0]).item()
    assert abs(losses[0] - plain) > 1e-4, "float8 is not on"


@pytest.mark.needs("accel-ddp", "accel-fsdp")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "gathers", "world"), WAYS[1:], ids=["ddp", "fsdp", "fsdp-gathers"])
@pytest.mark.by_default
def test_all_weights_train_in_parts_as_they_do_whole(
    strategy: str, gathers: bool, world: int, run_processes
) -> None:
    expected, by_library = by_hand("tensorwise")
    for losses, after in run_processes(trained, strategy, gathers, "tensorwise", world=world, timeout=200):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert_unequal(model().state_dict(), after)
        assert all(type(value) is torch.Tensor for value in after.values())
        for name, value in after.items():
            torch.testing.assert_close(value, by_library[name], atol=1e-5, rtol=0, msg=name)


def test_one_forward_is_in_float8() -> None:
    run = accelerator()
    net = run.prepare(model())
    ids = batches(1)[0]
    with torch.no_grad():
        difference = (net(ids) - model()(ids)).abs().max().item()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        from_bf16 = (net(ids) - model()(ids)).abs().max().item()
    run.end_training()
    assert difference > 1e-3
    assert from_bf16 > 1e-3
    assert set(CONVERTED) <= dict(net.named_parameters()).keys()
