"""Which layers become Transformer Engine's, what they keep, and what explain() says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from te_problem import TIMEOUT, accelerator, batches, loss_of, model, steps_of
from torch import nn
from torch.nn.utils import prune
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from accel_core import Accelerator, AccelError, ConfigError
from accel_transformer_engine import TransformerEngineConfig
from accel_transformer_engine.layers import choose


def chosen(net: nn.Module, **options: Any) -> list[str]:
    return list(choose(net, TransformerEngineConfig(**options)).chosen)


def test_options_choose_the_layers() -> None:
    net = model()
    everything = ["first", "block.norm", "block.up", "block.down", "last", "head"]
    assert chosen(net) == everything
    assert chosen(net, norms=False) == ["first", "block.up", "block.down", "head"]
    assert chosen(net, skip=r"block\..*") == ["first", "last", "head"]
    assert chosen(net, only=r".*down") == ["block.down"]
    assert chosen(net, filter=lambda layer, name: name != "head") == everything[:-1]


def test_an_odd_layer_does_not_keep_its_siblings_from_conversion() -> None:
    """Accelerate's conversion stops at the first odd layer."""
    net = nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    run = accelerator()
    prepared = run.prepare(net)
    assert [isinstance(layer, te.Linear) for layer in prepared] == [False, True, True]
    assert "not converted: 0: 10 to 16 features, not multiples of 16" in run.explain()
    run.end_training()


def test_a_tied_head_stays_tied_while_it_trains() -> None:
    """Accelerate's conversion gives the head a copy."""
    run = accelerator()
    net = model()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    steps_of(run, net, optimizer, batches(1))
    assert isinstance(net.head, te.Linear)
    assert net.head.weight is net.words.weight
    run.end_training()


def test_frozen_layers_stay_frozen() -> None:
    """Accelerate's conversion unfreezes them."""
    net = model()
    net.block.up.requires_grad_(False)
    before = net.block.up.weight.clone()
    run = accelerator()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    steps_of(run, net, optimizer, batches(1))
    assert torch.equal(net.block.up.weight, before)
    assert not net.block.up.bias.requires_grad
    run.end_training()


def test_layers_are_ordinary_ones_after_the_run() -> None:
    """Accelerate's conversion back raises TypeError."""
    net, ids = model(), batches(1)[0][:, :-1]
    before, attributes = net(ids), {*vars(net.block.up)}
    outputs = []
    for _ in range(2):
        run = accelerator()
        outputs.append(run.prepare(net)(ids))
        run.end_training()
        assert type(net.block.up) is nn.Linear
        assert type(net.block.norm) is nn.LayerNorm
        assert {*vars(net.block.up)} == attributes
        assert torch.equal(net(ids), before)
    assert torch.equal(*outputs)


def test_norms_without_weight_or_bias_stay_as_they_are() -> None:
    """Accelerate's conversion gives the first a bias, and fails at the second."""
    net = nn.Sequential(
        nn.Linear(16, 16),
        nn.LayerNorm(16, bias=False),
        nn.LayerNorm(16, elementwise_affine=False),
        nn.RMSNorm(16),
        nn.LayerNorm(16),
    )
    choice = choose(net, TransformerEngineConfig())
    assert list(choice.chosen) == ["0", "4"]
    assert choice.skipped == {
        "1": "it has no bias",
        "2": "it has no weight",
        "3": "its eps depends on the dtype of its input",
    }
    run = accelerator()
    del net[3]  # torch warns of it under autocast
    assert run.prepare(net)(torch.ones(16, 16)).shape == (16, 16)
    run.end_training()


def test_parameters_hooks_mode_names_and_attributes_are_kept() -> None:
    net, calls = model(), []
    net.block.eval()
    net.block.up.register_forward_hook(lambda *_: calls.append("after"))
    net.block.up.register_forward_pre_hook(lambda *_: calls.append("before"))
    net.block.up.label = "up"
    parameters, keys = dict(net.named_parameters()), list(net.state_dict())
    run = accelerator()
    prepared = run.prepare(net)
    prepared(batches(1)[0][:, :-1])
    assert all(parameter is parameters[name] for name, parameter in prepared.named_parameters())
    assert list(prepared.state_dict()) == keys
    assert not prepared.block.up.training
    assert prepared.first.training
    assert calls == ["before", "after"]
    assert prepared.block.up.label == "up"
    run.end_training()


def test_layers_with_a_forward_of_their_own_or_odd_weights_stay() -> None:
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    net = nn.Sequential(Doubled(16, 16), nn.Linear(16, 16), nn.MultiheadAttention(16, 2), nn.Linear(16, 16))
    net[1].forward = lambda x: x
    prune.l1_unstructured(net[3], "weight", amount=0.3)
    choice = choose(net, TransformerEngineConfig())
    assert not choice.chosen
    assert choice.skipped["0"] == "a Doubled, whose own forward would be lost"
    assert choice.skipped["1"] == "its forward was replaced on this instance"
    assert choice.skipped["2.out_proj"].startswith("a NonDynamicallyQuantizableLinear")
    assert choice.skipped["3"] == "its weight is computed by a hook"


def test_nothing_to_convert_is_an_error_with_each_reason() -> None:
    run = accelerator()
    with pytest.raises(ConfigError, match=r"no layer of the Sequential.*0: 16 to 15 features, not multiples"):
        run.prepare(nn.Sequential(nn.Linear(16, 15), nn.LayerNorm(15)))
    with pytest.raises(ConfigError, match=r"it has no linear layer.*\n.*mixed_precision: bf16"):
        run.prepare(nn.Embedding(4, 4))
    run.end_training()


def test_a_model_that_has_layers_of_the_library_needs_no_conversion() -> None:
    net = nn.Sequential(te.Linear(16, 16), te.LayerNorm(16))
    run = accelerator(recipe="delayed")
    prepared = run.prepare(net)
    prepared(torch.ones(16, 16)).sum().backward()
    assert list(prepared.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    run.end_training()
    assert type(net[0]) is te.Linear


def test_modules_are_fused_by_the_users_map() -> None:
    class Fused(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.norm, self.up, self.down = block.norm, block.up, block.down

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    run = accelerator(fused={"block": Fused})
    net = model()
    block = net.block
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    steps_of(run, net, optimizer, batches(1))
    assert type(net.block) is Fused
    assert isinstance(net.block.up, te.Linear)
    assert "  fused: block\n" in run.explain()
    run.end_training()
    assert net.block is block
    run = accelerator(fused={"blocks": Fused})
    with pytest.raises(ConfigError, match=r"no module of the Model has a name like 'blocks'"):
        run.prepare(model())
    run.end_training()


def test_a_module_of_two_names_is_fused_in_both_places() -> None:
    class Fused(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.layer = block[0]

        def forward(self, x):
            return torch.tanh(self.layer(x))

    block = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    net = nn.Sequential(block, nn.Linear(32, 32), block)
    run = accelerator(fused={"0": Fused})
    run.prepare(net)
    assert type(net[0]) is Fused
    assert net[2] is net[0]
    run.end_training()
    assert net[0] is block
    assert net[2] is block


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))


def as_one_kernel(plain: Any) -> nn.Module:
    """The library's fused module with the same parameters."""
    one = te.LayerNormMLP(32, 64, activation="gelu")
    one.layer_norm_weight, one.layer_norm_bias = plain.norm.weight, plain.norm.bias
    one.fc1_weight, one.fc1_bias = plain.up.weight, plain.up.bias
    one.fc2_weight, one.fc2_bias = plain.down.weight, plain.down.bias
    return one


def as_two_kernels(plain: Any) -> nn.Module:
    first = te.LayerNormLinear(32, 64)
    first.layer_norm_weight, first.layer_norm_bias = plain.norm.weight, plain.norm.bias
    first.weight, first.bias = plain.up.weight, plain.up.bias
    second = te.Linear(64, 32)
    second.weight, second.bias = plain.down.weight, plain.down.bias
    return nn.Sequential(first, nn.GELU(approximate="tanh"), second)


@pytest.mark.parametrize("fused", [as_one_kernel, as_two_kernels])
@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling])
def test_the_librarys_own_fused_modules_train_as_by_hand(fused: Any, recipe: Any) -> None:
    x = torch.linspace(-1, 1, 16 * 32).view(16, 32)
    by_hand = fused(FeedForward())
    optimizer: Any = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(recipe=recipe()):
            out = by_hand(x)
        out.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run = accelerator(fused={"0": fused}, te_recipe=recipe())
    plain = FeedForward()
    before = [parameter.clone() for parameter in plain.parameters()]
    net, optimizer = run.prepare(nn.Sequential(plain), torch.optim.SGD(plain.parameters(), lr=0.1))
    for _ in range(3):
        run.backward(net(x).float().square().sum())
        optimizer.step()
        optimizer.zero_grad()
    assert not [name for name in net.state_dict() if "extra_state" in name]
    run.end_training()
    for ours, theirs, first in zip(plain.parameters(), by_hand.parameters(), before, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, first)


def test_odd_numbers_of_tokens_are_refused_by_the_layers_name_or_padded() -> None:
    odd = batches(1)[0][:7, :4]
    run = accelerator()
    with pytest.raises(AccelError, match=r"layer first gets 21 tokens .*of 8\n.*pad_tokens: true"):
        loss_of(run.prepare(model()), odd)
    run.end_training()
    run = accelerator(pad_tokens=True, recipe="current")
    net = run.prepare(model())
    whole = net(batches(1)[0][:, :-1])
    part = net(batches(1)[0][:7, :-1])
    loss = part.square().sum()
    run.backward(loss)
    assert part.shape == (7, 4, 16)
    torch.testing.assert_close(part, whole[:7], atol=0.2, rtol=0)
    assert net.block.up.weight.grad.isfinite().all()
    run.end_training()


def test_a_model_is_evaluated_in_inference_mode() -> None:
    run = accelerator(in_evaluation=True)
    net, ids = run.prepare(model()), batches(1)[0][:, :-1]
    with torch.no_grad():
        expected = net(ids)
    with torch.inference_mode():
        assert torch.equal(net(ids), expected)
    run.end_training()


def test_the_plugin_is_named_by_its_name() -> None:
    run = Accelerator(device="cpu", mixed_precision="fp8-te", plugins=[TIMEOUT])
    assert run.run.stack.precision.name == "fp8-te"
    run.end_training()
