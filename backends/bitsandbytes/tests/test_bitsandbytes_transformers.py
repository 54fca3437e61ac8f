"""The same checkpoint, loaded by transformers itself and by us: equal layers and outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from quantised_problem import KINDS, config
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from accel_big_models import empty_weights
from accel_bitsandbytes import BitsAndBytesPlugin, adopt, load_and_quantize_model
from accel_core import Accelerator

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

LLAMA = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
IDS = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(3))


def asked(kind: str) -> BitsAndBytesConfig:
    ours = config(kind)
    return BitsAndBytesConfig(
        load_in_8bit=ours.load_in_8bit,
        load_in_4bit=ours.load_in_4bit,
        bnb_4bit_quant_type=ours.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=ours.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=ours.bnb_4bit_quant_storage,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def by_transformers(folder: Path, kind: str | None) -> Any:
    options = {} if kind is None else {"quantization_config": asked(kind)}
    net = LlamaForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, dtype=torch.float32, **options)
    for module in net.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # which computes in bfloat16 where a CPU can
    return net.eval()


def empty() -> Any:
    with empty_weights():
        return LlamaForCausalLM(LLAMA).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_transformers(folder: Path, kind: str) -> None:
    theirs, ours = by_transformers(folder, kind), load_and_quantize_model(empty(), config(kind), folder)
    with torch.no_grad():
        expected, found = theirs(IDS).logits, ours(IDS).logits
    assert torch.equal(found, expected)
    layers = {
        name for name, each in theirs.named_modules() if type(each).__module__ == "bitsandbytes.nn.modules"
    }
    assert layers == {
        name
        for name, each in ours.named_modules()
        if isinstance(each, (bnb.nn.Linear8bitLt, bnb.nn.Linear4bit))
    }
    assert len(layers) == 14
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        if "quant_state" not in name:
            assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nf4 in bfloat16"])
def test_checkpoints_that_are_quantised_go_both_ways(folder: Path, tmp_path: Path, kind: str) -> None:
    theirs = by_transformers(folder, kind)
    with torch.no_grad():
        expected = theirs(IDS).logits
    theirs.save_pretrained(tmp_path / "quantised")
    ours = load_and_quantize_model(empty(), config(kind), tmp_path / "quantised")
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, expected)
    run = Accelerator(device="cpu")
    run.save_model(run.prepare(ours), tmp_path / "exported")
    run.end_training()
    (tmp_path / "exported/config.json").write_text((tmp_path / "quantised/config.json").read_text())
    again = by_transformers(tmp_path / "exported", None)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, expected)


@pytest.mark.parametrize("kind", ["int8", "nf4, double"])
def test_a_model_that_transformers_loaded_is_resumed_whole(folder: Path, tmp_path: Path, kind: str) -> None:
    run = Accelerator(device="cpu", plugins=[BitsAndBytesPlugin()])
    net = run.prepare(by_transformers(folder, kind))
    with torch.no_grad():
        expected = net(IDS).logits
    run.save_state(tmp_path / "state")
    run.end_training()
    torch.manual_seed(8)
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path / "other")
    run = Accelerator(device="cpu", plugins=[BitsAndBytesPlugin()])
    net = run.prepare(by_transformers(tmp_path / "other", kind))
    run.load_state(tmp_path / "state")
    with torch.no_grad():
        assert torch.equal(net(IDS).logits, expected)
    run.end_training()


def test_adopted_layers_compute_as_before(folder: Path) -> None:
    net = by_transformers(folder, "nf4")
    with torch.no_grad():
        expected = net(IDS).logits
        assert len(adopt(net)) == 14
        assert torch.equal(net(IDS).logits, expected)
