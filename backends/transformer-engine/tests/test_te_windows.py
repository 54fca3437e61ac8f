"""Float8 weights that a window keeps are never older than the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_problem import accelerator
from torch import nn


class Writing(torch.optim.SGD):
    """Writes into `parameter.data`, which torch's count of changes does not see."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


class Skipping(nn.Module):
    """Its second layer sits out the micro-batches that say so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, short):
        return self.first(x) if short else self.second(self.first(x))


def trained(kind: Any) -> tuple[list[float], nn.Module]:
    run = accelerator(recipe="current")
    run.gradient_accumulation_steps = 2
    net = Skipping()
    net, optimizer = run.prepare(net, kind(net.parameters(), lr=1.0))
    losses = []
    for x in torch.randn(6, 8, 32, generator=torch.Generator().manual_seed(1)):
        with run.accumulate(net):
            loss = net(x, len(losses) % 2 == 0).float().square().mean()
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    run.end_training()
    return losses, net


def test_a_layer_that_sits_out_the_first_micro_batch_has_the_last_steps_weights() -> None:
    (losses, net), (expected, other) = trained(Writing), trained(torch.optim.SGD)
    assert losses == expected
    assert torch.equal(net.second.weight, other.second.weight)


@pytest.mark.parametrize("kind", [Writing, torch.optim.SGD])
def test_a_layer_that_computes_again_after_the_step_has_its_weights(kind: Any) -> None:
    run = accelerator(recipe="current")
    run.gradient_accumulation_steps = 2
    net = nn.Sequential(nn.Linear(32, 32))
    net, optimizer = run.prepare(net, kind(net.parameters(), lr=1.0))
    x = torch.randn(8, 32)
    for _ in range(2):
        with run.accumulate(net):
            run.backward(net(x).float().square().mean())
            optimizer.step()
    stepped = net(x)  # as a discriminator for its generator's loss
    anew = run.unwrap_model(net)[0]._inputs
    anew._last_weight = None
    assert torch.equal(stepped, net(x))
    run.end_training()


def test_weights_that_were_exchanged_within_a_window_are_rounded_anew() -> None:
    run = accelerator(recipe="current")
    run.gradient_accumulation_steps = 2
    net = run.prepare(nn.Sequential(nn.Linear(32, 32)))
    x = torch.randn(8, 32)
    with run.accumulate(net):
        run.backward(net(x).float().mean())
    with run.accumulate(net):
        before = net(x)
        net[0].weight.data = net[0].weight.data * 4
        edited = net(x)
    run.end_training()
    assert not torch.equal(before, edited)
