"""Loading and quantising: what is quantised, where it is, and what stays as it was."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from quantised_problem import KINDS, QUANTISED, config, empty, ids, model, saved
from safetensors.torch import save_file
from torch import nn

from accel_big_models import dispatch, plan_from_map, undo
from accel_bitsandbytes import BnbQuantizationConfig, converting, load_and_quantize_model, report
from accel_bitsandbytes.layers import Quantised, is_layout
from accel_core import AccelError, CheckpointError, ConfigError

ERROR = {"int8": 0.01}
"""Kind -> largest error of outputs, relative to the largest output; 0.1 with 4 bits."""


def in_a_file(tensor: torch.Tensor, folder: Path) -> bool:
    """Tell if the tensor is a view of a file that is, or was, in the folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.partition(" ")[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return str(folder) in line
    return False


def by_hand(kind: str) -> nn.Module:
    """Quantise by bitsandbytes itself, as its documentation does."""
    net = model()
    options = config(kind)
    for name in QUANTISED:
        layer = net.get_submodule(name)
        sizes = (layer.in_features, layer.out_features, layer.bias is not None)
        if options.load_in_8bit:
            made: Any = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
        else:
            made = bnb.nn.Linear4bit(
                *sizes,
                compute_dtype=torch.float32,
                compress_statistics=options.bnb_4bit_use_double_quant,
                quant_type=options.bnb_4bit_quant_type,
                quant_storage=options.bnb_4bit_quant_storage,
            )
            made.support_avx512bf16_for_cpu = False  # which computes in bfloat16 where a CPU can
        made.load_state_dict(layer.state_dict())
        net.set_submodule(name, made)
    return net.to("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_from_file_and_in_memory_it_computes_as_bitsandbytes_by_hand(
    tmp_path: Path, kind: str
) -> None:
    streamed = load_and_quantize_model(empty(), config(kind), saved(tmp_path))
    in_memory = load_and_quantize_model(model(), config(kind))
    expected = by_hand(kind)(ids())
    assert torch.equal(streamed(ids()), expected)
    assert torch.equal(in_memory(ids()), expected)
    exact = model()(ids())
    error = (expected - exact).abs().max() / exact.abs().max()
    assert 1e-4 < error < ERROR.get(kind, 0.1)
    assert [name for name, each in streamed.named_modules() if isinstance(each, Quantised)] == QUANTISED


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_quantised_in_pieces_as_it_is_at_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(converting, "PIECE", 128)
    options = config(kind, torch_dtype=dtype)
    for rows, columns in ((64, 33), (300, 70), (1, 4)):
        torch.manual_seed(rows)
        layer = nn.Linear(columns, rows, bias=False)
        weight = layer.weight.detach().to(dtype)
        converting.quantise("layer", layer, options, torch.device("cpu"))
        made: Any = layer.weight
        if options.load_in_8bit:
            values, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half())
            assert torch.equal(made.SCB, scales)
        else:
            values, state = bnb.functional.quantize_4bit(
                weight,
                compress_statistics=options.bnb_4bit_use_double_quant,
                quant_type=options.bnb_4bit_quant_type,
                quant_storage=converting.storage_of(options),
            )
            mine, theirs = (each.as_dict(packed=True) for each in (made.quant_state, state))
            mine = {
                name: part[: theirs[name].numel()] if is_layout(f".{name}") else part
                for name, part in mine.items()
            }
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], part) for name, part in theirs.items())
        assert made.data.dtype is values.dtype
        assert torch.equal(made.data.view(torch.uint8), values.view(torch.uint8))  # as numbers some are NaN


def test_the_config_and_the_state_of_layers_stay(tmp_path: Path) -> None:
    net, options = empty().eval(), config("nf4")
    up = net.blocks[0].up
    up.bias.requires_grad_(False)
    calls: list[str] = []
    up.register_forward_hook(lambda *_: calls.append("up"))
    net.words.weight.requires_grad_(False)
    names, before = list(dict(net.named_parameters())), copy.deepcopy(options)
    net = load_and_quantize_model(net, options, saved(tmp_path))
    assert options == before
    assert list(dict(net.named_parameters())) == names
    assert net.blocks[0].up is up
    assert not up.training
    net(ids())
    assert calls == ["up"]
    trained = [name for name, each in net.named_parameters() if each.requires_grad]
    assert "words.weight" not in trained
    assert "blocks.0.up.bias" not in trained
    assert "blocks.1.up.bias" in trained
    assert not any(name.endswith(("up.weight", "down.weight")) for name in trained)


def test_tied_layers_stay_tied_and_the_report_says_why(tmp_path: Path) -> None:
    net = load_and_quantize_model(
        empty(tied=True), config("int8", skip_modules=[]), saved(tmp_path, tied=True)
    )
    assert net.head.weight is net.words.weight
    assert "not quantised: head: its weight is also words.weight" in report(net)


def test_skipped_and_wide_modules_are_named_and_have_their_dtypes(tmp_path: Path) -> None:
    options = config(
        "nf4", torch_dtype="bf16", skip_modules=["blocks.0", "tail"], keep_in_fp32_modules=["norm", "down"]
    )
    net = load_and_quantize_model(empty(), options, saved(tmp_path))
    assert net.blocks[0].up.weight.dtype is torch.bfloat16
    assert net.blocks[1].down.weight.dtype is torch.float32
    assert net.blocks[1].norm.weight.dtype is torch.float32
    assert torch.equal(net.blocks[1].norm.weight, model().blocks[1].norm.weight)
    assert net.words.weight.dtype is torch.bfloat16
    assert isinstance(net.head, Quantised)
    lines = report(net).splitlines()
    assert lines[0] == "nf4 by bitsandbytes: blocks.1.up, blocks.2.up, head"
    assert "not quantised: blocks.0.up: named in skip_modules" in lines
    assert "not quantised: blocks.1.down: named in keep_in_fp32_modules" in lines
    assert "not quantised: tail: named in the config, but the model has no such module" in lines


def test_layers_with_a_forward_of_their_own_stay() -> None:
    class Own(nn.Linear):
        pass

    net = nn.Sequential(Own(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    load_and_quantize_model(net, config("int8"))
    assert type(net[0]) is Own
    assert isinstance(net[1], Quantised)
    assert "0: it is a Own, which has its own forward" in report(net)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (nn.utils.spectral_norm, "its weight is computed by a hook"),
        (lambda layer: vars(layer).update(forward=layer.forward), "its forward was replaced"),
    ],
    ids=["weight", "forward"],
)
def test_layers_that_hooks_or_the_instance_compute_stay(own: Any, says: str) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    own(net[0])
    load_and_quantize_model(net, config("nf4"))
    assert f"not quantised: 0: {says}" in report(net)
    assert net(torch.ones(1, 64, dtype=net[0].bias.dtype)).isfinite().all()


def test_nothing_to_quantise_is_an_error_with_each_reason() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ConfigError, match=r"0: named in skip_modules; .*1: named in skip_modules"):
        load_and_quantize_model(net, config("int8", skip_modules=["0", "1"]))
    assert type(net[0]) is nn.Linear
    with pytest.raises(ConfigError, match="it has no linear layer"):
        load_and_quantize_model(nn.Sequential(nn.ReLU()), config("int8"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_on_disk_is_written_there_and_computes_the_same(tmp_path: Path, kind: str) -> None:
    file = saved(tmp_path)
    expected = load_and_quantize_model(model(), config(kind))(ids())
    folder = tmp_path / "away"
    places = {"words": "cpu", "blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "disk", "head": "cpu"}
    net = load_and_quantize_model(empty(), config(kind), file, device_map=places, offload_folder=folder)
    assert net.hf_device_map == places
    assert torch.equal(net(ids()), expected)
    assert [name for name in QUANTISED if in_a_file(net.get_submodule(name).weight, folder)] == QUANTISED[2:]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_come_and_go_compute_the_same_and_train_nothing_below(kind: str) -> None:
    net = load_and_quantize_model(model(), config(kind))
    expected = net(ids())
    dispatch(net, plan_from_map(net, {"": "disk"}), mapped=False)
    assert net.blocks[0].up.weight.numel() == 0
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(net(ids()), expected)
    net.requires_grad_(False)
    inputs = torch.randn(2, 7, 64, requires_grad=True)
    with pytest.raises(AccelError, match=r"needs a quantised weight of .* that was moved from cpu"):
        net.blocks[1](inputs).sum().backward()
    undo(net)
    net.blocks[1](inputs).sum().backward()
    assert inputs.grad is not None


def test_a_checkpoint_of_another_model_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    state = model().state_dict()
    del state["blocks.1.up.weight"]
    save_file(state, tmp_path / "model.safetensors")
    net = empty()
    with pytest.raises(CheckpointError, match=r"it lacks blocks\.1\.up\.weight"):
        load_and_quantize_model(net, config("nf4"), tmp_path)
    assert type(net.blocks[0].up) is nn.Linear
    assert net.words.weight.is_meta


def interrupted_at_the_third_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(100))

    def interrupting(real: Any) -> Any:
        def quantise(*args: Any, **options: Any) -> Any:
            if next(count) == 2:
                raise KeyboardInterrupt
            return real(*args, **options)

        return quantise

    for name in ("quantize_4bit", "int8_vectorwise_quant"):
        monkeypatch.setattr(bnb.functional, name, interrupting(getattr(bnb.functional, name)))


@pytest.mark.parametrize("kind", ["int8", "fp4"])
def test_a_load_that_is_interrupted_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    saved(tmp_path)
    interrupted_at_the_third_layer(monkeypatch)
    net = empty()
    before = {name: (id(each), each.dtype, each.device) for name, each in net.named_parameters()}
    with pytest.raises(KeyboardInterrupt):
        load_and_quantize_model(net, config(kind, torch_dtype=torch.float16), tmp_path)
    assert {name: (id(each), each.dtype, each.device) for name, each in net.named_parameters()} == before
    assert type(net.blocks[0].up) is nn.Linear


@pytest.mark.parametrize("kind", ["int8", "fp4"])
def test_an_interrupted_quantisation_in_memory_leaves_each_layer_as_one_that_computes(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    interrupted_at_the_third_layer(monkeypatch)
    net = model()
    with pytest.raises(KeyboardInterrupt):
        load_and_quantize_model(net, config(kind))
    assert isinstance(net.blocks[0].up, Quantised)
    assert net(ids()).isfinite().all()


def test_weights_that_do_not_fit_into_the_kind_are_refused_by_name(tmp_path: Path) -> None:
    state = model().state_dict()
    state["blocks.1.up.weight"][3, 3] = 1e6  # float16 has no such number
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"blocks\.1\.up\.weight has values that are not finite in torch"):
        load_and_quantize_model(empty(), config("int8"), tmp_path)


@pytest.mark.parametrize("in_file", [True, False])
def test_other_weights_that_float16_cannot_hold_are_refused_by_name(tmp_path: Path, in_file: bool) -> None:
    """Accelerate makes them infinite, as `half()` does."""
    large = model()
    large.blocks[1].norm.weight.data[3] = 1e5
    save_file(large.state_dict(), tmp_path / "model.safetensors")

    def load(**options: Any) -> Any:
        net = empty() if in_file else copy.deepcopy(large)
        options = {"load_in_8bit": True, **options}
        try:
            quantised = BnbQuantizationConfig(**options)
            return load_and_quantize_model(net, quantised, tmp_path if in_file else None)
        except ConfigError:
            assert {each.dtype for each in net.parameters()} == {torch.float32}
            raise

    with pytest.raises(ConfigError, match=r"blocks\.1\.norm\.weight has values .* torch\.float16") as raised:
        load()
    assert str(raised.value).endswith("set torch_dtype='bf16', or keep_in_fp32_modules=['norm', ...]")
    assert load(keep_in_fp32_modules=["norm"]).blocks[1].norm.weight[3] == 1e5
    assert load(torch_dtype="bf16").blocks[1].norm.weight.isfinite().all()


def test_a_value_beside_nan_and_infinity_is_refused_and_these_stay_as_they_are(tmp_path: Path) -> None:
    state = model().state_dict()
    state["blocks.1.norm.weight"][:2] = torch.tensor([math.nan, -math.inf])
    save_file(state, tmp_path / "model.safetensors")
    net = load_and_quantize_model(empty(), BnbQuantizationConfig(load_in_8bit=True), tmp_path)
    kept = net.blocks[1].norm.weight
    assert kept.dtype is torch.float16
    assert kept[0].isnan()
    assert kept[1] == -math.inf

    state["blocks.1.norm.weight"][2] = 1e5
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"blocks\.1\.norm\.weight has values .* torch\.float16"):
        load_and_quantize_model(empty(), BnbQuantizationConfig(load_in_8bit=True), tmp_path)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "are both False"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "are both True"),
        ({"load_in_8bit": 1}, "load_in_8bit must be True or False, got 1"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "one of fp4, nf4"),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": "int8"},
            "bnb_4bit_compute_dtype must be one of .*, got 'int8'",
        ),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": "yes"}, "True or False"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.int64},
            "bnb_4bit_quant_storage must be one of .*, got torch.int64",
        ),
        ({"load_in_4bit": True, "llm_int8_threshold": 3.0}, "has no effect with load_in_4bit"),
        ({"load_in_8bit": True, "llm_int8_threshold": "6"}, "a number"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "a list of names"),
        ({"load_in_8bit": True, "torch_dtype": "half"}, "torch_dtype must be one of .*, got 'half'"),
        (
            {"load_in_4bit": True, "torch_dtype": torch.float64},
            "torch_dtype must be one of .*, got torch.float64\nuse one",
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BnbQuantizationConfig(**wrong)


def test_defaults_are_those_of_accelerate() -> None:
    assert BnbQuantizationConfig(load_in_8bit=True).torch_dtype is torch.float16
    made = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert (made.torch_dtype, made.bnb_4bit_quant_type) == (torch.bfloat16, "fp4")


def test_wrong_calls_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match="weights_location is None\nname the checkpoint"):
        load_and_quantize_model(empty(), config("int8"))
    with pytest.raises(ConfigError, match="must be one of auto, sequential"):
        load_and_quantize_model(model(), config("int8"), device_map="balanced")
    with pytest.raises(ConfigError, match="got 0\nto place the whole model"):
        load_and_quantize_model(model(), config("int8"), device_map=0)  # type: ignore[arg-type]


def test_moved_and_copied_layers_keep_their_statistics() -> None:
    net = load_and_quantize_model(model(), config("nf4, double"))
    expected = net(ids())
    twin = copy.deepcopy(net).to(torch.bfloat16).to(torch.float32)
    layer = twin.blocks[0].up
    assert layer.weight.quant_state.state2.absmax is dict(layer.named_buffers())["weight.nested_absmax"]
    assert torch.equal(layer.weight.quant_state.offset, net.blocks[0].up.weight.quant_state.offset)
    assert layer.weight.quant_state.state2.absmax.dtype is torch.float32
    assert (twin(ids()) - expected).abs().max() < 0.05
    packed = load_and_quantize_model(model(), config("nf4 in bfloat16"))
    with pytest.raises(AccelError, match=r"packed 4-bit values as torch.bfloat16 and cannot be cast to"):
        packed.to(torch.float16)


@pytest.mark.parametrize("kind", KINDS)
def test_only_one_block_at_a_time_is_in_memory_unquantised(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in weights: when a layer is quantised, no layer of another block has values of full size."""
    from accel_bitsandbytes import loading

    net, whole = empty(), []
    quantise = loading.quantise

    def count(name: str, layer: nn.Linear, *rest: Any) -> None:
        layers = {other: each for other, each in net.named_modules() if type(each) is nn.Linear}
        real = {other for other, each in layers.items() if not each.weight.is_meta}
        whole.append({other.rpartition(".")[0] for other in real} - {name.rpartition(".")[0]})
        quantise(name, layer, *rest)

    monkeypatch.setattr(loading, "quantise", count)
    load_and_quantize_model(net, config(kind), saved(tmp_path))
    assert whole == [set()] * 6
