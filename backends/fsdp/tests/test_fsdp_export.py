"""Whole weights for other libraries: where they are, what gathers them, and under which names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import experts_problem  # noqa: F401  its models join those of grid_job
import grid_job
import pytest
import torch
from fsdp_problem import accelerator, distance
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_core import Accelerator, ParallelismConfig
from accel_fsdp import FullyShardedDataParallelPlugin
from accel_testing import Traffic

BLOCKS, PARTS = 5, 3


class Part(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(PARTS))
        self.odd = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x * self.odd.sum()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Part() for _ in range(BLOCKS)))


def prepared(run: Accelerator) -> nn.Module:
    model = network()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def plugin(version: int = 2, **options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=version, **{"transformer_cls_names_to_wrap": ["Part"], **options}
    )


def gathered_by_block(precision: str) -> tuple[int, float, list[str]]:
    run = accelerator(plugin(), mixed_precision=precision)
    model = prepared(run)
    with Traffic() as seen:
        found = dict(run.iter_weights(model))
    gathers, _ = seen.kinds()["all_gather"]
    gap = distance(found, network().state_dict())
    run.end_training()
    return gathers, gap, [*found]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_version_2_gathers_each_block_once_in_all_its_digits(precision: str, run_processes) -> None:
    for gathers, gap, names in run_processes(gathered_by_block, precision):
        assert (gathers, gap) == (BLOCKS, 0.0)
        assert sorted(names) == sorted(network().state_dict())


def answered(version: int) -> tuple[float | None, set[str], bool, str]:
    run = accelerator(plugin(version))
    model = prepared(run)
    found = run.get_state_dict(model)
    all_of_it = run.get_state_dict(model, rank0_only=False)
    gap = distance(dict(found), network().state_dict()) if found else None
    alike = distance(dict(all_of_it), network().state_dict()) == 0
    devices = {tensor.device.type for tensor in all_of_it.values()}
    run.end_training()
    return gap, devices, alike, "" if found else repr(found)


@pytest.mark.parametrize("version", [1, 2])
def test_rank_0_alone_gets_the_weights_unless_asked(version: int, run_processes) -> None:
    first, second = run_processes(answered, version)
    assert first == (0.0, {"cpu"}, True, "")
    assert second[:3] == (None, {"cpu"}, True)
    assert "rank0_only=False" in second[3]


def answered_on_a_mesh(name: str) -> tuple[list[str], bool, int]:
    run = Accelerator(cpu=True)
    model, _ = grid_job.model_and_data(name)
    wanted = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    found = run.get_state_dict(model)
    same = all(torch.equal(tensor, wanted[key]) for key, tensor in found.items())
    run.end_training()
    return sorted(found), same, len(wanted)


@pytest.mark.parametrize(
    ("sizes", "plan", "name"),
    [({"tp": 2}, grid_job.GPT_PLAN, "gpt"), ({"pp": 2}, None, "untied"), ({"ep": 2}, None, "chosen")],
    ids=["tp", "pp", "ep"],
)
def test_split_layers_stages_and_experts_are_put_together_on_rank_0(
    sizes: dict[str, int], plan: Any, name: str, run_processes
) -> None:
    variables = grid_job.environment(sizes, plan)
    (names, same, count), second = run_processes(answered_on_a_mesh, name, environment=variables)
    assert len(names) == count
    assert same
    assert second == ([], True, count)


class Renamed(nn.Module):
    """Is known to others by older names, by a hook on the names of its children."""

    def __init__(self, *, adds: bool = True) -> None:
        super().__init__()
        self.inner = nn.Sequential(*map(nn.Linear, (6, 5), (5, 6)))
        self._register_state_dict_hook(_rename)
        if adds:
            self.register_state_dict_post_hook(_add)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key in [key for key in state if "inner." in key]:
        state[key.replace("inner.", "old.")] = state.pop(key)


def _add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}format"] = torch.tensor([2])


def renamed(options: dict[str, Any], folder: str) -> list[str]:
    given = {"transformer_cls_names_to_wrap": ["Linear"], **options}
    stages = ParallelismConfig(pp=given.pop("pp", 1))
    run = accelerator(plugin(**given), stages)
    model = Renamed(adds="pp" not in options)
    model = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    names = [*run.get_state_dict(model, rank0_only=False)]
    run.save_model(model, folder)
    run.end_training()
    return names


@pytest.mark.parametrize(
    "options",
    [{"version": 1}, {"version": 2}, {"state_dict_type": "FULL_STATE_DICT"}, {"pp": 2}],
    ids=str,
)
def test_hooks_that_rename_weights_or_add_to_them_are_followed(
    options: dict[str, Any], tmp_path: Path, run_processes
) -> None:
    wanted = sorted(Renamed(adds="pp" not in options).state_dict())
    assert "old.0.bias" in wanted
    for names in run_processes(renamed, options, str(tmp_path)):
        assert sorted(names) == wanted
    assert sorted(load_file(tmp_path / "model.safetensors")) == wanted
