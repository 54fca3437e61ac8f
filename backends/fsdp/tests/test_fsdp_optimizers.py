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
from accel_testing import run_processes

ELEMENTWISE = ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "SGD"]
VERSIONS = (1, 2)


class Named(torch.optim.SGD):
    """An optimizer of another library, by its name."""


def called(name: str) -> type[torch.optim.Optimizer]:
    return type(name, (Named,), {})


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
    found = {key: tensor.clone() for key, tensor in run.get_state_dict(model).items()}
    run.end_training()
    return found


def each(version: int, names: list[str]) -> dict[str, dict[str, Tensor]]:
    return {name: trained(version, name) for name in names}


@pytest.mark.parametrize("version", VERSIONS)
def test_optimizers_of_single_elements_step_as_in_one_process(version: int) -> None:
    names = [*ELEMENTWISE, *(["Rprop"] if version == 1 else [])]
    for found in run_processes(each, version, names):
        torch.testing.assert_close(found, each(0, names))


def orthogonalized(version: int) -> dict[str, Tensor]:
    # Muon iterates in bfloat16, whose rounding differs with the order of sums: here in float32.
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    assert ".bfloat16()" in source
    exec(source.replace(".bfloat16()", ".clone()"), vars(_muon))
    return trained(version, "Muon")


def test_muon_computes_with_whole_matrices_of_version_2() -> None:
    (expected,) = run_processes(orthogonalized, 0, world=1)
    for found in run_processes(orthogonalized, 2):
        torch.testing.assert_close(found, expected)


def refused(version: int, kind: Any, says: bool, options: dict[str, Any]) -> str | None:
    made = getattr(torch.optim, kind, None) or called(kind)
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
        (1, "Adafactor", "take strategy ddp"),
        (2, "Adafactor", "AdamW"),
        (1, "Muon", "fsdp_version: 2"),
        (2, "Rprop", "fsdp_version: 1"),
        (1, "DistributedShampoo", "elementwise = True"),
        (1, "SOAP", "elementwise = True"),
        (1, "FusedLAMB", "elementwise = True"),
        (1, "Prodigy", "elementwise = True"),
    ],
)
def test_an_optimizer_that_needs_whole_weights_is_named(version: int, kind: str, advice: str) -> None:
    for said in run_processes(refused, version, kind, False, {}):
        assert said is not None
        assert said.startswith(kind)
        assert advice in said.splitlines()[-1]


def test_an_optimizer_may_say_that_it_treats_each_element_by_itself() -> None:
    assert run_processes(refused, 1, "SOAP", True, {}) == [None, None]


def test_whole_weights_suit_every_optimizer() -> None:
    assert run_processes(refused, 1, "Muon", False, {"sharding_strategy": "NO_SHARD"}) == [None, None]
    assert refused(1, "Muon", False, {}) is None
