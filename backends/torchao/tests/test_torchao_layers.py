"""Which layers compute in float8, what they keep, and what explain() says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from float8_problem import Model, accelerator, batches, loss_of, model
from torch import nn
from torch.nn.utils import prune

from accel_core import Accelerator, AccelError, ConfigError
from accel_torchao import Float8Config, quantize
from accel_torchao.conversion import _CastInput, convert, library_config
from accel_torchao.layers import choose


def chosen(net: nn.Module, **options: Any) -> list[str]:
    return list(choose(net, Float8Config(**options)).chosen)


def test_options_choose_the_layers() -> None:
    net = model()
    assert chosen(net) == ["block.up", "block.down"]
    assert chosen(net, first_and_last=True) == ["first", "block.up", "block.down", "head"]
    assert chosen(net, skip=r"block\.d.*") == ["block.up"]
    assert chosen(net, only=r".*down") == ["block.down"]
    assert chosen(net, min_features=33) == []
    assert chosen(net, multiple_of=64) == []
    assert chosen(net, filter=lambda layer, name: layer.out_features == 64) == ["block.up"]


def test_layers_with_a_forward_of_their_own_stay() -> None:
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    net = nn.Sequential(Doubled(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.MultiheadAttention(16, 2))
    net[1].forward = lambda x: x
    choice = choose(net, Float8Config(first_and_last=True))
    assert list(choice.chosen) == ["2"]
    assert choice.skipped["0"] == "a Doubled, whose own forward would be lost"
    assert choice.skipped["1"] == "its forward was replaced on this instance"
    assert choice.skipped["3.out_proj"].startswith("a NonDynamicallyQuantizableLinear")


def test_explain_names_each_layer_with_its_reason() -> None:
    run = accelerator()
    run.prepare(model())
    text = run.explain()
    run.end_training()
    assert "  precision fp8-torchao (accel-torchao" in text
    assert "  float8 (tensorwise): block.up, block.down\n" in text
    assert "  not float8: head: the first or last linear layer (first_and_last)\n" in text


def test_ties_frozen_weights_hooks_mode_and_attributes_are_kept() -> None:
    net, calls = model(), []
    net.block.eval()
    net.block.up.weight.requires_grad_(False)
    net.block.up.register_forward_hook(lambda *_: calls.append("after"))
    net.block.up.register_forward_pre_hook(lambda *_: calls.append("before"))
    net.block.up.label = "up"
    parameters = dict(net.named_parameters())
    run = accelerator(first_and_last=True)
    prepared = run.prepare(net)
    prepared(batches(1)[0])
    assert all(parameter is parameters[name] for name, parameter in prepared.named_parameters())
    assert prepared.head.weight is prepared.words.weight
    assert type(prepared.head).__name__ == type(prepared.block.up).__name__ == "Float8Linear"
    assert not prepared.block.up.weight.requires_grad
    assert not prepared.block.up.training
    assert prepared.first.training
    assert calls == ["before", "after"]
    assert prepared.block.up.label == "up"
    run.end_training()


def test_a_model_that_is_one_layer_is_converted() -> None:
    run = accelerator(first_and_last=True)
    layer = nn.Linear(16, 16)
    prepared = run.prepare(layer)
    assert prepared is layer
    assert type(prepared).__name__ == "Float8Linear"
    run.end_training()


def test_layers_are_ordinary_ones_after_the_run() -> None:
    net, ids = model(), batches(1)[0]
    net.block.up.config = "the user's own"
    before, attributes = net(ids), {*vars(net.block.up)}
    outputs = []
    for _ in range(2):
        run = accelerator()
        outputs.append(run.prepare(net)(ids))
        run.end_training()
        assert type(net.block.up) is nn.Linear
        assert {*vars(net.block.up)} == attributes
        assert torch.equal(net(ids), before)
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], before)
    assert net.block.up.config == "the user's own"


def test_a_model_is_evaluated_in_inference_mode() -> None:
    run = accelerator()
    net, ids = run.prepare(model()), batches(1)[0]
    with torch.inference_mode():
        found = net(ids)
    expected = net(ids)
    assert expected.requires_grad
    assert torch.equal(found, expected)
    run.end_training()


def test_weights_that_are_no_ordinary_parameters_stay() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    prune.l1_unstructured(net[0], "weight", amount=0.3)
    quantize(net, "int8", only="1")
    choice = choose(net, Float8Config(first_and_last=True))
    assert list(choice.chosen) == ["2"]
    assert choice.skipped == {"0": "its weight is computed by a hook", "1": "its weight is a Int8Tensor"}


def test_options_that_a_config_overrides_are_refused() -> None:
    for more in ({"recipe": "rowwise"}, {"pad_inner_dim": True}, {"emulate": True}):
        with pytest.raises(ValueError, match=r"config is set together with recipe.*\nset these in"):
            Float8Config(config=library_config(Float8Config()), **more)


def test_nothing_to_convert_is_an_error_with_each_reason() -> None:
    run = accelerator()
    net = nn.Sequential(nn.Linear(16, 15), nn.Linear(15, 15), nn.Linear(15, 16))
    with pytest.raises(ConfigError, match=r"no layer of the Sequential.*1: 15 to 15 features, not multiples"):
        run.prepare(net)
    with pytest.raises(ConfigError, match=r"it has no linear layer.*\n.*mixed_precision: bf16"):
        run.prepare(nn.Embedding(4, 4))
    run.end_training()


def test_odd_numbers_of_tokens_are_refused_by_the_layers_name_on_gpus() -> None:
    run = accelerator()
    prepared = run.prepare(model())
    check = _CastInput("block.up", "cpu", checks=True)
    prepared.block.up.register_forward_pre_hook(check, with_kwargs=True)
    with pytest.raises(AccelError, match=r"layer block.up gets 21 tokens .*\n.*pad_inner_dim: true"):
        prepared(batches(1)[0][:7, :3])
    prepared(batches(1)[0][:8, :2])
    with torch.no_grad():
        prepared(batches(1)[0][:7, :3])
    run.end_training()


def test_a_recipe_that_the_chip_lacks_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("rowwise scaling needs another chip\nmore")

    monkeypatch.setattr(torch, "_scaled_mm", lacks)
    run = accelerator(recipe="rowwise")
    with pytest.raises(ConfigError, match=r"recipe rowwise: cpu cannot.*needs another chip\n.*emulate"):
        run.prepare(model())
    run.end_training()


@pytest.mark.needs("accel-fsdp")
def test_weights_are_gathered_in_float8_only_where_a_strategy_does_so() -> None:
    run = accelerator(all_gather=True)
    with pytest.raises(ConfigError, match=r"all_gather: strategy single does not gather block.up.weight"):
        run.prepare(model())
    run.end_training()
    with pytest.raises(ConfigError, match="all_gather: recipe rowwise has scales per row"):
        accelerator("fsdp", all_gather=True, recipe="rowwise")


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fp8_torchao.skip: '\(' is not a regular expression"):
        Float8Config(skip="(")


def test_the_compiled_model_gives_the_same() -> None:
    run = accelerator()
    net = run.prepare(model())
    ids = batches(1)[0]
    eager = loss_of(net, ids).item()
    again = torch.compile(net, backend="eager")
    assert loss_of(again, ids).item() == eager
    run.end_training()


def test_models_built_on_the_meta_device_are_converted_there() -> None:
    with torch.device("meta"):
        net = Model()
    choice = choose(net, Float8Config())
    assert list(choice.chosen) == ["block.up", "block.down"]
    convert(net, choice.chosen, library_config(Float8Config()), "cpu")
    assert type(net.block.up).__name__ == "Float8Linear"
    assert net.block.up.weight.is_meta


def test_the_plugin_is_named_by_its_word_and_by_its_name() -> None:
    for word in ("fp8", "fp8-torchao"):
        run = Accelerator(device="cpu", mixed_precision=word)
        assert run.run.stack.precision.name == "fp8-torchao"
        assert run.mixed_precision == word
        run.end_training()
