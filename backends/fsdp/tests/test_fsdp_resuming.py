"""Parameters and optimizers of any kind: saved by one strategy, resumed by another, and saved again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_problem import TIMEOUT
from torch import Tensor, nn
from torch.nn import functional as F

from accel_core import Accelerator, ConfigError
from accel_fsdp import FullyShardedDataParallelPlugin

VERSIONS = (1, 2)


class Lying(nn.Module):
    """Weights that do not lie in memory row by row, and one that is shorter than the world."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.convolutions = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 3, 3))
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.mixed = nn.Parameter(torch.randn(4, 2, 5).permute(1, 2, 0))
        self.single = nn.Parameter(torch.randn(1, 1, 1))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convolutions(x).mean((2, 3)) @ self.turned
        return (hidden @ self.mixed.sum(0)).square().mean() + (self.single * hidden.mean()).sum()


class Plain(nn.Sequential):
    """Of two ranks one has no element of most of its parameters."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x.flatten(1)[:, :8]), torch.ones(len(x), 4))


class Empty(Plain):
    """A parameter without elements, such as an expert that nobody has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))


MODELS = {each.__name__: each for each in (Lying, Plain, Empty)}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.1, "foreach": True},  # the default on a GPU
    "NAdam": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.3},
    "ASGD": {"lr": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9},
}


class Job:
    """A run in one process or in many; a batch is the same on all ranks."""

    def __init__(self, stack: str, model: str, optimizer: str) -> None:
        version = int(stack.removeprefix("fsdp") or 2) if stack != "single" else 0
        plugins = [FullyShardedDataParallelPlugin(fsdp_version=version)] if version else []
        self.run = Accelerator(
            device="cpu", strategy="fsdp" if version else "single", plugins=[TIMEOUT, *plugins]
        )
        net = MODELS[model]()
        made = getattr(torch.optim, optimizer)(net.parameters(), **OPTIMIZERS[optimizer])
        self.model, self.optimizer = self.run.prepare(net, made)

    def train(self, steps: range) -> None:
        for step in steps:
            x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
            self.run.backward(self.model(x))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {
            name: tensor.clone()
            for name, tensor in self.run.get_state_dict(self.model, rank0_only=False).items()
        }


def in_one_go(
    stack: str, model: str, optimizer: str, steps: int, folder: str | None = None
) -> dict[str, Tensor]:
    job = Job(stack, model, optimizer)
    job.train(range(steps))
    if folder is not None:
        job.run.save_state(folder)
    found = job.weights()
    job.run.end_training()
    return found


def goes_on(
    stack: str,
    model: str,
    optimizer: str,
    folder: str,
    steps: range,
    after: str | None = None,
    twice: bool = False,
) -> dict[str, Tensor]:
    """Load, save at once if asked, train, save."""
    job = Job(stack, model, optimizer)
    job.run.load_state(folder)
    if twice:
        job.run.save_state(f"{after}-before")
    job.train(steps)
    if after is not None:
        job.run.save_state(after)
    found = job.weights()
    job.run.end_training()
    return found


def world_of(stack: str) -> int:
    return 1 if stack == "single" else 2


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [("fsdp1", "single"), ("single", "fsdp1"), ("fsdp1", "fsdp1")])
def test_parameters_in_any_memory_order_are_saved_as_what_they_are(
    tmp_path: Path, first: str, second: str, run_processes
) -> None:
    folder = str(tmp_path / "saved")
    run_processes(in_one_go, first, "Lying", "AdamW", 2, folder, world=world_of(first))
    for found in run_processes(
        goes_on, second, "Lying", "AdamW", folder, range(2, 4), world=world_of(second)
    ):
        torch.testing.assert_close(found, in_one_go("single", "Lying", "AdamW", 4))


def prepare_whole(lying: bool) -> str:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy="NO_SHARD")
    accelerator = Accelerator(device="cpu", strategy="fsdp", plugins=[plugin])
    model = nn.Conv2d(3, 4, 3)
    try:
        accelerator.prepare(model.to(memory_format=torch.channels_last) if lying else model)
    except ConfigError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return ""


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_where_nothing_is_cut_version_1_refuses_another_memory_order_by_name(
    world: int, run_processes
) -> None:
    for said in run_processes(prepare_whole, True, world=world):
        assert said.startswith("weight, [4, 3, 3, 3]: fsdp_version 1 without shards cannot train")
    assert run_processes(prepare_whole, False, world=world) == [""] * world


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.by_default("2-AdamW-False")
def test_a_resumed_run_is_saved_and_resumed_again(
    tmp_path: Path, version: int, optimizer: str, twice: bool, run_processes
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    stack = f"fsdp{version}"
    in_one_go("single", "Plain", optimizer, 2, first)
    run_processes(goes_on, stack, "Plain", optimizer, first, range(2, 4), second, twice)

    torch.testing.assert_close(
        goes_on("single", "Plain", optimizer, second, range(4, 6)), in_one_go("single", "Plain", optimizer, 6)
    )


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_a_parameter_without_elements_is_saved_and_resumed(
    tmp_path: Path, version: int, run_processes
) -> None:
    folder, stack = str(tmp_path / "saved"), f"fsdp{version}"
    run_processes(in_one_go, stack, "Empty", "AdamW", 2, folder)
    expected = in_one_go("single", "Empty", "AdamW", 4)
    torch.testing.assert_close(goes_on("single", "Empty", "AdamW", folder, range(2, 4)), expected)
    for found in run_processes(goes_on, stack, "Empty", "AdamW", folder, range(2, 4)):
        torch.testing.assert_close(found, expected)


def refused(version: int, kind: str) -> str:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "transposed":
        net[1].weight = nn.Parameter(net[1].weight.detach().t())
    elif kind == "with gaps":
        net[1].weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    elif kind == "0-dim":
        net[1].scale = nn.Parameter(torch.ones(()))
    elif kind == "mixed":
        net[1].to(torch.bfloat16)
    elif kind == "complex":
        net[0].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
    elif kind == "integers":
        net[0].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int64), requires_grad=False)
    run = Accelerator(
        device="cpu", strategy="fsdp", plugins=[FullyShardedDataParallelPlugin(fsdp_version=version)]
    )
    with pytest.raises(ConfigError) as caught:
        run.prepare(net)
    run.end_training()
    return str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("version", "kind", "name", "advice"),
    [
        (2, "transposed", "1.weight", "contiguous()"),
        (1, "with gaps", "1.weight", "contiguous()"),
        (2, "with gaps", "1.weight", "contiguous()"),
        (1, "0-dim", "1.scale", "shape (1,)"),
        (2, "0-dim", "1.scale", "shape (1,)"),
        (1, "mixed", "1.weight", "give them one dtype"),
        (2, "mixed", "1.weight", "give them one dtype"),
        (1, "complex", "0.weight", "make it two real ones"),
        (2, "complex", "0.weight", "make it two real ones"),
        (1, "integers", "0.weight", "set fsdp.fsdp_version: 2"),
    ],
)
def test_a_parameter_that_cannot_be_sharded_is_named_with_what_to_do(
    version: int, kind: str, name: str, advice: str
) -> None:
    said = refused(version, kind)
    assert name in said.splitlines()[0]
    assert advice in said.splitlines()[-1]
