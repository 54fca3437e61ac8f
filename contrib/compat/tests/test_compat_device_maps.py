"""Device maps and balanced memory are Accelerate's own, over random models and memories."""

from __future__ import annotations

import pytest
import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory, get_max_memory
from accelerate.utils.modeling import check_tied_parameters_on_same_device
from peers import needs_accelerate, said
from torch import nn

CASES = """
import json, logging, random, warnings
import torch
from torch import nn
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
logging.disable(logging.CRITICAL)

class Block(nn.Module):
    def __init__(self, random, depth):
        super().__init__()
        kinds = ["linear", "norm", "block", "weight", "buffer", "embedding", "empty"]
        for number in range(random.randint(1, 4)):
            name, kind = f"part{number}", random.choice(kinds if depth else kinds[:2])
            if kind == "linear":
                self.add_module(name, nn.Linear(random.randint(1, 9), 5, random.random() < 0.5))
            elif kind == "norm":
                self.add_module(name, nn.BatchNorm1d(random.randint(1, 9)))
            elif kind == "block":
                made = type(random.choice(["Block", "Layer"]), (Block,), {})
                self.add_module(name, made(random, depth - 1))
            elif kind == "weight":
                self.register_parameter(name, nn.Parameter(torch.zeros(random.randint(1, 40))))
            elif kind == "buffer":
                dtype = random.choice([torch.float32, torch.int64, torch.bool])
                buffer = torch.zeros(random.randint(1, 40), dtype=dtype)
                self.register_buffer(name, buffer, random.random() < 0.5)
            elif kind == "embedding":
                self.add_module(name, nn.Embedding(random.randint(1, 9), 8))
            else:
                self.add_module(name, nn.Identity())

def tie(model, random):
    homes = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if len(homes) > 1:
        first, second = random.sample(homes, 2)
        second.weight = first.weight

def outcome(function):
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return [function(), ["requires" in str(each.message) for each in caught]]
    except Exception as error:
        return type(error).__name__

shown = []
for seed in range(FIRST, FIRST + 400):
    random_ = random.Random(seed)
    model = Block(random_, 3)
    tie(model, random_)
    total = sum(4 * each.numel() for each in model.parameters())
    memory = {number: random_.randint(0, max(1, total)) for number in range(random_.randint(0, 3))}
    memory["cpu"] = random_.randint(0, 2 * total + 1)
    if random_.random() < 0.2:
        memory["disk"] = 10 * total
    whole = random_.choice([None, ["Block"], "Layer", ["Block", "Layer"], ["Linear"]])
    dtype = random_.choice([None, torch.float16, "bfloat16", torch.float64])
    low, clean, buffers, fallback = (random_.random() < 0.5 for _ in range(4))
    sizes = {key: value for key, value in memory.items() if key != "disk"}
    special = {name: torch.float64 for name, _ in model.named_parameters() if random_.random() < 0.1}
    given = (whole, dtype, special)
    balanced = outcome(lambda: list(get_balanced_memory(model, dict(sizes), *given, low).items()))
    rest = (False, clean, buffers, fallback)
    mapped = outcome(lambda: list(infer_auto_device_map(model, dict(memory), *given, *rest).items()))
    shown.append([balanced, mapped])
print(json.dumps(shown))
"""
MENDED = ["IndexError", "AttributeError"]
"""Crashes of Accelerate: a weight is tied to one of the model's own, or to one that is placed already."""


@needs_accelerate
@pytest.mark.parametrize("first", [0, pytest.param(400, marks=pytest.mark.full)])
def test_maps_of_random_models_are_the_same(first, run_processes):
    code = CASES.replace("FIRST", str(first))
    theirs, ours = said(run_processes, code, ours=False), said(run_processes, code, ours=True)
    pairs = [pair for cases in zip(theirs, ours, strict=True) for pair in zip(*cases, strict=True)]

    assert [pair for pair in pairs if pair[0] != pair[1] and pair[0] not in MENDED] == []
    assert [own for _, own in pairs if isinstance(own, str)] == []
    assert sum(isinstance(their, list) for their, _ in pairs) > 750


def test_a_device_that_is_none_is_refused():
    with pytest.raises(ValueError, match="Device cuda:0 is not recognized"):
        get_max_memory({"cuda:0": "1GB"})


def test_a_limit_for_the_disk_is_no_device_to_balance():
    model = nn.Linear(2, 2)
    assert get_balanced_memory(model, {"cpu": 10, "disk": 10}) == {"cpu": 10, "disk": 10}


def test_a_tie_with_a_weight_of_the_model_itself_is_placed_together():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4, 4))
    model.head = nn.Linear(4, 4, bias=False)
    model.head.weight = model.weight

    assert infer_auto_device_map(model, {"cpu": 1000}) == {"": "cpu"}


def test_ties_over_several_devices_are_warned_of(caplog):
    check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"a": 0, "b": "cpu"})
    assert "Tied parameters are on different devices: {'a.weight': 0, 'b.weight': 'cpu'}" in caplog.text
    with pytest.raises(ValueError, match="does not contain the module c.weight"):
        check_tied_parameters_on_same_device([["c.weight"]], {"a": 0})
