"""`accel estimate` counts what a model has, and says what fits where."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

from accel_big_models.commands import estimate as command
from accel_big_models.estimating import estimate
from accel_big_models.models import empty_model
from accel_core import ConfigError

CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", __import__("torch").zeros(2, dtype=__import__("torch").int64))

def build():
    return Net()

def failing():
    return 1 / 0


def nothing():
    return None
"""
PARAMETERS = 40 + 3 * 20


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_net.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_net", raising=False)
    return "my_net"


def run(*words: str) -> str:
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_ties_count_once_and_other_dtypes_stay(module):
    found = json.loads(run(f"{module}:build", "--json", "--memory", "cpu=1MB"))

    assert found["parameters"] == PARAMETERS
    assert found["stored"] == {"float32": PARAMETERS}
    assert found["needs"]["float32"] == {
        "weights": 4 * PARAMETERS + 16,
        "largest_block": 160,
        "adam": 16 * PARAMETERS + 16,
    }
    assert found["needs"]["bfloat16"]["weights"] == 2 * PARAMETERS + 16
    assert found["needs"]["int4"] == {"weights": PARAMETERS // 2 + 16, "largest_block": 20, "adam": None}
    assert found["plan"]["used"] == {"cpu": 4 * PARAMETERS + 16}


def test_frozen_weights_have_neither_gradients_nor_moments():
    model = nn.Sequential(nn.Linear(4, 4, bias=False).requires_grad_(False), nn.Linear(4, 4, bias=False))
    assert estimate(model).needs[0].training == 4 * 16 + 16 * 16


def test_the_table_says_what_lies_where(module):
    shown = run(f"{module}:build", "--memory", "cpu=300B", "--memory", "disk=1GB", "--dtype", "float32")

    assert "100 parameters (100 in float32)" in shown
    assert "the largest is embedding" in shown
    assert "  disk: " in shown
    assert "weights in float32:" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_what_fits_nowhere_is_said(module):
    found = estimate(empty_model(f"{module}:build"), {"cpu": 10})
    assert "fit nowhere" in found.plan
    assert "fit nowhere" in found.as_table("net")
    assert "fit nowhere" in found.as_json("net")["plan"]["refused"]


def test_a_file_of_weights_is_a_model_too(tmp_path):
    state = {f"layers.{number}.weight": torch.zeros(4, 4, dtype=torch.bfloat16) for number in range(3)}
    save_file(
        {**state, "scale": torch.zeros(2), "seen": torch.zeros(3, dtype=torch.int64)},
        tmp_path / "w.safetensors",
    )
    model = empty_model(str(tmp_path / "w.safetensors"))
    found = estimate(model, {"cpu": 1000})

    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert found.stored == {"bfloat16": 48, "float32": 2}
    assert isinstance(model.layers, nn.ModuleList)
    assert found.needs[0].weights == 4 * 50 + 24


@pytest.mark.parametrize(
    ("name", "text"),
    {
        "my_net:failing": r"(?s)it raised an error\nTraceback .*, in failing\n.*ZeroDivisionError.*\nname a ",
        "my_net:nothing": "it returned a NoneType",
        "my_net:missing": "has no attribute 'missing'",
        "my_net:__name__": "it is a str",
        ":thing": "Empty module name",
        "no_such:thing": "No module named 'no_such'",
        "./nowhere": "there is no such folder or file",
    }.items(),
)
def test_what_is_no_model_is_refused(module, name, text):
    with pytest.raises(ConfigError, match=text):
        empty_model(name)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)])
def test_a_weight_without_a_shape_is_named(lazy):
    with pytest.raises(ConfigError, match=r"0\.\w+ of the Sequential has no shape .*\nrun one forward"):
        estimate(nn.Sequential(lazy))


def test_options_that_mean_nothing_are_refused(module):
    with pytest.raises(ConfigError, match="it has no size"):
        run(f"{module}:build", "--memory", "cpu")
    with pytest.raises(ConfigError, match="torch has no such dtype"):
        run(f"{module}:build", "--dtype", "float7")
    with pytest.raises(ConfigError, match="is not a size"):
        run(f"{module}:build", "--memory", "cpu=-5")
    with pytest.raises(ConfigError, match="not a torch device"):
        run(f"{module}:build", "--memory", "chip=5GB")


def test_a_config_of_transformers_is_enough(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    found = estimate(empty_model(str(tmp_path)), {"cpu": "1GB"})
    wanted = sum(weight.numel() for weight in transformers.LlamaForCausalLM(config).parameters())

    assert (found.kind, found.parameters) == ("LlamaForCausalLM", wanted)
    assert set(found.stored) == {"bfloat16"}
    assert found.block == "model.layers.0"
