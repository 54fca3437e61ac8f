"""Backwards that Transformer Engine would compute silently otherwise than asked."""

from __future__ import annotations

import pytest
import torch
import transformer_engine.pytorch as te
from te_problem import accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_core import AccelError


@pytest.mark.parametrize("training", [True, False])
def test_a_penalty_on_gradients_is_refused_and_trains_if_its_layers_are_kept(training: bool) -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    x = torch.randn(8, 16, requires_grad=True)
    run = accelerator(recipe="current")
    prepared = run.prepare(net).train(training)
    with pytest.raises(AccelError, match=r"layer 2 gets a backward with create_graph=True.*\n.*fp8_te.skip"):
        torch.autograd.grad(prepared(x).float().sum(), x, create_graph=True)
    run.end_training()
    run = accelerator(recipe="current", only=r"1\..*")
    prepared = run.prepare(nn.Sequential(net, nn.Sequential(nn.Linear(16, 16))))
    (gradient,) = torch.autograd.grad(prepared[0](x).float().sum(), x, create_graph=True)
    run.backward(gradient.square().mean())
    run.end_training()
    assert net[0].weight.grad.abs().sum() > 0


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.layer, x, use_reentrant=True) if self.training else self.layer(x)


def test_an_evaluation_before_the_backward_hides_no_recomputation_in_bfloat16() -> None:
    run = accelerator(recipe="current")
    net = run.prepare(Recomputed())
    x = torch.randn(8, 32)
    loss = net(x).float().square().mean()
    with torch.no_grad():
        net.eval()(x)
    net.train()
    with pytest.raises(AccelError, match="layer layer was computed in float8"):
        run.backward(loss)
    run.end_training()


def test_the_librarys_own_layers_raise_alike_and_are_left_as_they_were() -> None:
    net = Recomputed()
    net.layer = te.LayerNormLinear(32, 32)
    x = torch.randn(8, 32, requires_grad=True)
    run = accelerator(recipe="current")
    prepared = run.prepare(net)
    with pytest.raises(AccelError, match="layer layer was computed in float8"):
        run.backward(prepared(x).float().square().mean())
    with pytest.raises(AccelError, match="layer layer gets a backward with create_graph=True"):
        torch.autograd.grad(prepared.eval()(x).float().sum(), x, create_graph=True)
    run.end_training()
    assert not net.layer._forward_hooks
    assert not net.layer._forward_pre_hooks
