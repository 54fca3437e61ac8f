"""A conversion that changes weights, flags or modules in place is kept as it is."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from big_model_problems import model
from safetensors.torch import save_file
from torch import nn

from accel_big_models import empty_weights, load, plan, plan_from_map, weights_of
from accel_core import CheckpointError, ConfigError


class Twice(nn.Module):
    """Its last block is its first one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.blocks.append(self.blocks[0])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def twice(folder: Path, *prefixes: str) -> tuple[Twice, Twice, Path]:
    """A model, an empty one, and a file of its weights under these names."""
    whole = Twice()
    with empty_weights():
        target = Twice()
    weights = {name: value.clone() for name, value in whole.state_dict().items() if name.startswith(prefixes)}
    save_file(weights, folder / "weights.safetensors")
    return whole, target, folder / "weights.safetensors"


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("mapped", [True, False])
def test_weights_of_another_dtype_stay_so(tmp_path: Path, place: str, mapped: bool) -> None:
    whole, target, file = twice(tmp_path, "blocks.0", "blocks.1")
    places = plan_from_map(target, {"": place})
    load(target, file, places, mapped=mapped, convert=lambda name, block: block.double())

    x = torch.ones(2, 8, dtype=torch.float64)
    assert {value.dtype for _, value in weights_of(target)} == {torch.float64}
    torch.testing.assert_close(target(x), whole.double()(x), rtol=0, atol=1e-15)


def test_weights_that_are_frozen_stay_so_and_train_again_after_an_error(tmp_path: Path) -> None:
    _, target, file = twice(tmp_path, "blocks.0", "blocks.1")

    def frozen(name: str, block: nn.Module) -> nn.Module:
        if name == stops_at:
            raise KeyboardInterrupt
        return block.requires_grad_(False)

    stops_at = "blocks.1"
    with pytest.raises(KeyboardInterrupt):
        load(target, file, convert=frozen)
    assert all(weight.requires_grad for weight in target.parameters())
    stops_at = ""
    load(target, file, convert=frozen)
    assert not any(weight.requires_grad for weight in target.parameters())


def test_a_block_of_two_names_is_replaced_in_both_places(tmp_path: Path) -> None:
    class Doubled(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.layer = copy.deepcopy(block[0])

        def forward(self, x):
            return torch.tanh(self.layer(x))

    whole, target, file = twice(tmp_path, "blocks.0", "blocks.1")
    load(target, file, convert=lambda name, block: Doubled(block))
    assert target.blocks[2] is target.blocks[0]
    torch.testing.assert_close(target(torch.ones(2, 8)), whole(torch.ones(2, 8)))


@pytest.mark.parametrize("names", [("blocks",), ("blocks.1", "blocks.2")])
def test_weights_are_known_by_each_name_of_their_module(tmp_path: Path, names: tuple[str, ...]) -> None:
    whole, target, file = twice(tmp_path, *names)
    load(target, file)
    torch.testing.assert_close(target(torch.ones(2, 8)), whole(torch.ones(2, 8)))


def test_names_of_one_module_with_other_values_are_refused(tmp_path: Path) -> None:
    whole, target, file = twice(tmp_path, "blocks")
    weights = {name: value.clone() for name, value in whole.state_dict().items()}
    weights["blocks.2.0.weight"] += 1
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"blocks.0.0.weight and blocks.2.0.weight are one tensor"):
        load(target, file)


def test_a_plan_refuses_a_conversion_that_returns_nothing() -> None:
    with pytest.raises(ConfigError, match=r"convert: for embedding it returned a NoneType\nreturn the block"):
        plan(model(), {"cpu": "1GiB"}, convert=lambda name, block: None)
