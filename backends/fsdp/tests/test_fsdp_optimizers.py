"""Optimizers that need more than an element: right where they can be, else refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from fsdp_problem import TIMEOUT
from torch import Tensor, nn
from torch.optim import _muon

from accel_core import Accelerator, ConfigError
from accel_fsdp import FullyShardedDataParallelPlugin

ELEMENTWISE = ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "SGD"]
VERSIONS = (1, 2)


class Rated(torch.optim.Optimizer):
    """A rate for each tensor, by its norm: the rule of LAMB and LARS, in a class that no list can know."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * each.norm() * each.grad)


class Camera(torch.optim.SGD):
    """Steps single elements, though its name contains that of CAME, which needs rows and columns."""


OWN = {kind.__name__: kind for kind in (Rated, Camera)}


def prepared(version: int, kind: Any, **options: Any) -> tuple[Accelerator, nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 5, bias=False))
    plugins = [FullyShardedDataParallelPlugin(fsdp_version=version, **options)] if version else []
    run = Accelerator(device="cpu", strategy="fsdp" if version else "single", plugins=[TIMEOUT, *plugins])
    optimizer = kind(net.parameters(), lr=0.1)
    model, optimizer = run.prepare(net, optimizer)
    return run, model, optimizer


def trained(version: int, name: str) -> dict[str, Tensor]:
    run, model, optimizer = prepared(version, getattr(torch.optim, name))
    for step in range(4):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    found = {key: tensor.clone() for key, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.end_training()
    return found


def each(version: int, names: list[str]) -> dict[str, dict[str, Tensor]]:
    return {name: trained(version, name) for name in names}


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_optimizers_of_single_elements_step_as_in_one_process(version: int, run_processes) -> None:
    names = [*ELEMENTWISE, *(["Rprop"] if version == 1 else [])]
    for found in run_processes(each, version, names):
        torch.testing.assert_close(found, each(0, names))


def orthogonalized(version: int) -> dict[str, Tensor]:
    # Muon iterates in bfloat16, whose rounding differs with the order of sums: here in float32.
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    assert "bfloat16" in source
    source = source.replace(".bfloat16()", ".clone()").replace("torch.bfloat16", "torch.float32")
    exec(source, vars(_muon))
    return trained(version, "Muon")


def test_muon_computes_with_whole_matrices_of_version_2(run_processes) -> None:
    (expected,) = run_processes(orthogonalized, 0, world=1)
    for found in run_processes(orthogonalized, 2):
        torch.testing.assert_close(found, expected)


def refused(version: int, kind: Any, says: bool, options: dict[str, Any]) -> str | None:
    made = OWN[kind] if kind in OWN else getattr(torch.optim, kind)
    if says:
        made = type(kind, (made,), {"elementwise": True})
    try:
        run, *_ = prepared(version, made, **options)
    except ConfigError as error:
        return str(error)
    run.end_training()
    return None


@pytest.mark.parametrize(
    ("version", "kind", "advice"),
    [
        (1, "LBFGS", "AdamW"),
        (2, "LBFGS", "AdamW"),
        (1, "Adafactor", "or strategy ddp"),
        (2, "Adafactor", "AdamW"),
        (1, "Muon", "fsdp_version: 2"),
        (2, "Rprop", "fsdp_version: 1"),
        (1, "Rated", "elementwise = True"),
    ],
)
@pytest.mark.by_default("1-LBFGS-AdamW", "2-LBFGS-AdamW", "1-Rated-elementwise = True")
def test_an_optimizer_that_needs_whole_weights_is_named(
    version: int, kind: str, advice: str, run_processes
) -> None:
    for said in run_processes(refused, version, kind, False, {}):
        assert said is not None
        assert said.startswith(kind)
        assert advice in said.splitlines()[-1]


def test_an_optimizer_is_judged_by_what_it_computes(run_processes) -> None:
    assert run_processes(refused, 1, "Camera", False, {}) == [None, None]


def test_version_2_serves_optimizers_of_whole_tensors(run_processes) -> None:
    assert run_processes(refused, 2, "Rated", False, {}) == [None, None]


@pytest.mark.full
def test_an_optimizer_may_say_that_it_treats_each_element_by_itself(run_processes) -> None:
    assert run_processes(refused, 1, "Rated", True, {}) == [None, None]


@pytest.mark.full
def test_whole_weights_suit_every_optimizer(run_processes) -> None:
    assert run_processes(refused, 1, "Muon", False, {"sharding_strategy": "NO_SHARD"}) == [None, None]
    assert refused(1, "Muon", False, {}) is None


class Counting(torch.optim.SGD):
    """Keeps a value for all parameters beside what it keeps of each."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.state["all"] = {"steps": 7}


def kept_of_all(version: int) -> Any:
    run, _, optimizer = prepared(version, Counting)
    found = optimizer.state["all"]
    run.end_training()
    return found


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_state_of_no_parameter_from_before_prepare_stays(version: int, run_processes) -> None:
    assert run_processes(kept_of_all, version) == [{"steps": 7}] * 2


def layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(6, 4).double(), nn.Linear(4, 2).double()


def losses(first: nn.Module, second: nn.Module) -> Any:
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        yield second(first(x)).square().mean()


def trained_late(version: int, joined: bool) -> dict[str, Tensor]:
    """Weights of two models that were prepared before the optimizers of their original parameters."""
    run = Accelerator(
        device="cpu",
        strategy="fsdp",
        plugins=[TIMEOUT, FullyShardedDataParallelPlugin(fsdp_version=version)],
    )
    modules = layers()
    owned = [list(module.parameters()) for module in modules]
    models = [run.prepare(module) for module in modules]
    groups = [[owned[0][0], owned[1][0]], [owned[0][1], owned[1][1]]] if joined else [owned[0], owned[1]]
    optimizers = [run.prepare(torch.optim.SGD(group, lr=0.1)) for group in groups]
    for loss in losses(*models):
        run.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = {
        f"{number}.{name}": tensor.clone()
        for number, model in enumerate(models)
        for name, tensor in run.get_state_dict(model, rank0_only=False).items()
    }
    run.end_training()
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("joined", [False, True], ids=["one each", "over both"])
@pytest.mark.by_default("one each-2")
def test_optimizers_that_come_after_their_models_find_the_parameters(
    version: int, joined: bool, run_processes
) -> None:
    modules = nn.ModuleList(layers())
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)
    for loss in losses(*modules):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_processes(trained_late, version, joined):
        torch.testing.assert_close(found, {**modules.state_dict()}, rtol=1e-12, atol=1e-12)
