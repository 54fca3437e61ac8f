"""Blocks are converted while they are loaded, each on the device where it is computed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from big_model_problems import Model, ids, model, shards
from torch import nn

from accel_big_models import empty_weights, load, plan, plan_from_map, undo, weights_of
from accel_core import Accelerator, ConfigError


class Int8Linear(nn.Module):
    """A layer as third parties write them: integers and scales in place of a weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def int8(name: str, block: nn.Module) -> nn.Module:
    """Replace the block's first layer; the second's weight is used without a call of its module."""
    if hasattr(block, "first"):
        block.first = Int8Linear(block.first)
    return block


def empty() -> Model:
    with empty_weights():
        return Model()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shards(tmp_path / "c", model())


@pytest.mark.parametrize("mapped", [True, False])
def test_a_converted_model_computes_as_one_converted_after_loading(folder: Path, mapped: bool) -> None:
    whole = model()
    for block in whole.blocks:
        int8("", block)
    target = empty()
    kept = dict(target.named_parameters())
    load(target, folder, convert=int8, mapped=mapped)

    assert torch.equal(target(ids()), whole(ids()))
    assert target.head.weight is target.embedding.weight
    assert target.blocks[0].first.weight.dtype == torch.int8
    assert all(kept[name] is value for name, value in target.named_parameters())
    assert {name for name, _ in weights_of(target)} == whole.state_dict().keys() - {"head.weight"}


def test_each_block_comes_once_with_the_values_and_the_dtype_it_is_loaded_in(folder: Path) -> None:
    seen = []

    def look(name: str, block: nn.Module) -> nn.Module:
        seen.append(
            (name, {it.dtype for it in block.parameters()}, any(it.is_meta for it in block.parameters()))
        )
        return block

    told = []
    target = load(
        empty(),
        folder,
        plan(empty(), {"cpu": "1GB"}, dtype=torch.bfloat16),
        convert=look,
        progress=lambda done, total: told.append((done, total)),
    )

    names = ["embedding", *(f"blocks.{number}" for number in range(4)), "norm", "head"]
    assert seen == [(name, {torch.bfloat16}, False) for name in names]
    assert torch.equal(target(ids()), model().bfloat16()(ids()))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 0


def test_a_block_may_be_replaced_and_frozen_weights_stay_frozen(folder: Path) -> None:
    target = empty()
    target.blocks.requires_grad_(False)

    class Wrapped(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.gain = nn.Parameter(block.gain.detach() * 2)
            self.inner = block

        def forward(self, x):
            return self.inner(x)

    load(target, folder, convert=lambda name, block: Wrapped(block) if "blocks.0" in name else block)

    assert isinstance(target.blocks[0], Wrapped)
    assert torch.equal(target(ids()), model()(ids()))
    trained = [name for name, value in target.named_parameters() if value.requires_grad]
    assert not [name for name in trained if name.startswith("blocks")]
    assert "scale" in trained


def test_what_convert_writes_into_a_weight_stays(folder: Path) -> None:
    def double(name: str, block: nn.Module) -> nn.Module:
        if name == "norm":
            with torch.no_grad():
                block.weight.mul_(2)
        return block

    target = load(empty(), folder, convert=double)
    assert torch.equal(target.norm.weight, model().norm.weight * 2)


def test_a_tied_weight_that_would_come_apart_is_named_and_nothing_changes(folder: Path) -> None:
    def all_linear(name: str, block: nn.Module) -> nn.Module:
        return Int8Linear(block) if isinstance(block, nn.Linear) else int8(name, block)

    target = model(seed=5)
    before = {name: (id(value), value.clone()) for name, value in target.state_dict(keep_vars=True).items()}
    layer = target.blocks[0].first
    with pytest.raises(ConfigError, match=r"head\.weight was replaced, and .*embedding\.weight.* one tensor"):
        load(target, folder, convert=all_linear)

    after = target.state_dict(keep_vars=True)
    assert {name: id(value) for name, value in after.items()} == {
        name: it for name, (it, _) in before.items()
    }
    assert all(torch.equal(value, before[name][1]) for name, value in after.items())
    assert target.blocks[0].first is layer


@pytest.mark.parametrize("mapped", [True, False])
def test_what_it_makes_of_parts_on_disk_computes_from_a_file(folder: Path, mapped: bool) -> None:
    def halves(name: str, block: nn.Module) -> nn.Module:
        """Replace one weight, write into another, and leave the others."""
        if hasattr(block, "first"):
            block.first.weight = nn.Parameter(block.first.weight.detach().bfloat16().float())
            block.gain.data.mul_(2)
        return block

    whole, target = model(), empty()
    for block in whole.blocks:
        halves("", block)
    load(target, folder, plan_from_map(target, {"": "cpu", "blocks": "disk"}), convert=halves, mapped=mapped)

    assert torch.equal(target(ids()), whole(ids()))
    assert torch.equal(target(ids()), whole(ids()))
    state = whole.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in weights_of(target))


def test_a_plan_counts_what_convert_makes_and_leaves_the_model_as_it_was() -> None:
    size = sum(parameter.nbytes for parameter in model().blocks[0].parameters())
    for target in (empty(), model()):
        before = dict(target.named_parameters())
        places = plan(target, {"cpu": "1GB"}, convert=int8)

        whole = model()
        for block in whole.blocks:
            int8("", block)
        tensors = {id(each): each.nbytes for each in (*whole.parameters(), *whole.buffers())}
        assert places.used == {"cpu": sum(tensors.values())}
        assert places.memory["cpu"] == 10**9 - size
        assert all(before[name] is value for name, value in target.named_parameters())
        assert type(target.blocks[0].first) is nn.Linear


def test_a_plan_says_that_convert_needs_values() -> None:
    def look(name: str, block: nn.Module) -> nn.Module:
        assert all(float(value.sum()) != 0 for value in block.parameters())
        return block

    with pytest.raises(ConfigError, match="convert cannot make embedding without values.*\n.*plan_from_map"):
        plan(empty(), {"cpu": "1GB"}, convert=look)


def test_buffers_that_would_come_and_go_and_other_results_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"buffer blocks\.1\.first\.weight, and blocks\.1 lies on 'disk'"):
        load(empty(), folder, plan_from_map(empty(), {"": "cpu", "blocks.1": "disk"}), convert=int8)
    with pytest.raises(ConfigError, match="for embedding it returned a NoneType"):
        load(empty(), folder, convert=lambda name, block: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match=r"blocks\.0\.gain is on meta afterwards.*computed on cpu"):
        load(empty(), folder, convert=lambda name, block: block.to("meta") if "blocks" in name else block)


def test_a_run_trains_beside_it_saves_it_and_undo_leaves_it(tmp_path: Path, folder: Path) -> None:
    target = load(empty(), folder, convert=int8)
    want = target(ids()).detach()
    accelerator = Accelerator(cpu=True, strategy="dispatched")
    prepared = accelerator.prepare(target)
    accelerator.save_model(prepared, tmp_path / "out")
    accelerator.end_training()
    undo(target)
    again = model(seed=5)
    for block in again.blocks:
        int8("", block)
    load(again, tmp_path / "out")

    assert torch.equal(target(ids()), want)
    assert torch.equal(again(ids()), want)


MEMORY = """
import sys, threading, time
from pathlib import Path
import torch
from torch import nn
from accel_big_models import empty_weights, load
if sys.argv[2] == "sim":
    from accel_testing.simulated.device import simulate
    simulate()
from accel_big_models import plan_from_map
WIDTH, BLOCKS = 1024, 16

class Int8(nn.Module):
    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", torch.div(weight, self.scale).to(torch.int8))

def anonymous():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024

def block():
    return nn.ModuleDict({key: nn.Linear(WIDTH, WIDTH, bias=False) for key in ("one", "two")})

with empty_weights():
    model = nn.ModuleList(block() for _ in range(BLOCKS))
    model = nn.ModuleDict({"blocks": model})

def convert(name, block):
    peaks.append(anonymous())
    for key in ("one", "two"):
        block[key] = Int8(block[key])
    peaks.append(anonymous())
    return block

convert_once = Int8(nn.Linear(8, 8).to(sys.argv[2]))  # imports and threads before measuring
peaks = []
base = anonymous()
places = plan_from_map(model, {"": sys.argv[2]})
load(model, sys.argv[1], places, convert=convert, mapped=sys.argv[3] == "True")
one = 2 * 4 * WIDTH * WIDTH
print((max(peaks) - base) / one, (anonymous() - base) / one)
"""


@pytest.mark.parametrize(("device", "mapped"), [("cpu", False), ("sim", True)])
def test_host_memory_is_the_converted_model_and_two_blocks_at_most(
    tmp_path: Path, device: str, mapped: bool, run_command
) -> None:
    from safetensors.torch import save_file

    weights = {
        f"blocks.{number}.{key}.weight": torch.randn(1024, 1024)
        for number in range(16)
        for key in ("one", "two")
    }
    save_file(weights, tmp_path / "model.safetensors")
    # Small blocks would else share the allocator's pages, and be counted after they are freed.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "500000"}
    command = [sys.executable, "-c", MEMORY, str(tmp_path), device, str(mapped)]
    done = run_command(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    peak, resident = map(float, done.stdout.split())

    assert resident < 16 / 4 + 0.6  # of 16 blocks, a quarter of their bytes
    assert peak < resident + 2
