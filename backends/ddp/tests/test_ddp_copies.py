"""Copies and pickles of prepared models: teachers, target networks, averages by hand."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_problem import accelerator, batches, rank
from torch import nn
from torch.nn import functional as F

from accel_ddp import DDPCommunicationHookType, DistributedDataParallelKwargs

STATIC = DistributedDataParallelKwargs(static_graph=True)
POWER_SGD = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)


def unpickled(model: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))
    return loaded


def compute(run: Any, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    run.backward(F.mse_loss(model(x), y))


def train(run: Any, model: nn.Module, optimizer: Any) -> None:
    for x, y in batches(3, rank()):
        optimizer.zero_grad()
        compute(run, model, x, y)
        optimizer.step()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained_copy(duplicate: Callable[[nn.Module], nn.Module], *options: Any) -> tuple[torch.Tensor, ...]:
    """Weights of a copy that was trained, those of its model, and what training a model gives."""
    run = accelerator(*options, gradient_accumulation_steps=2)
    model, reference = run.prepare(small()), run.prepare(small())
    compute(run, model, *batches(1, rank())[0])
    model.zero_grad()
    with run.accumulate(model):  # the first of two micro-batches, which reduces nothing
        copied = duplicate(model)
    for each in (copied, reference):
        train(run, each, torch.optim.SGD(each.parameters(), lr=0.1))
    found = flat(copied), flat(model), flat(reference)
    run.end_training()
    return found


@pytest.mark.parametrize("duplicate", [copy.deepcopy, unpickled])
@pytest.mark.parametrize("options", [(), (STATIC,), (POWER_SGD,)], ids=["plain", "static", "power_sgd"])
@pytest.mark.by_default
def test_a_copy_trains_as_a_model_of_its_own(duplicate: Any, options: Any, run_processes) -> None:
    (first, untouched, _), (second, *_) = run_processes(trained_copy, duplicate, *options)
    ((_, _, expected), _) = run_processes(trained_copy, duplicate)
    assert torch.equal(first, second)
    assert torch.equal(untouched, flat(small()))
    torch.testing.assert_close(first, expected)


def written_copy(folder: str, compiled: bool) -> tuple[list[str], list[str], bool]:
    """Names of a copy's weights, in its state and in a file; whether it unwraps to the module inside."""
    run = accelerator()
    copied = copy.deepcopy(run.prepare(small()))
    inner: Any = copied.module
    given: Any = torch.compile(copied, backend="eager") if compiled else copied
    run.save_model(given, folder, safe_serialization=False)
    unwrapped = [run.unwrap_model(given, keep_torch_compile=keep) for keep in (True, False)]
    names = sorted(run.get_state_dict(given))
    run.end_training()
    found = sorted(torch.load(Path(folder, "pytorch_model.bin")))
    return names, found, all(each is inner for each in unwrapped)


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_of_a_copy_have_the_names_of_the_users_model(
    tmp_path: Path, compiled: bool, run_processes
) -> None:
    names = sorted(small().state_dict())
    assert run_processes(written_copy, str(tmp_path), compiled) == [(names, names, True)] * 2


def freed() -> tuple[bool, list[str]]:
    """Of a model of before `free_memory`: whether it unwraps to the user's, and names of its weights."""
    run, model = accelerator(), small()
    wrapped = run.prepare(model)
    run.free_memory()
    found = run.unwrap_model(wrapped) is model, sorted(run.get_state_dict(wrapped))
    run.end_training()
    return found


def test_a_model_of_before_free_memory_unwraps_and_has_the_names_of_the_users_model(run_processes) -> None:
    assert run_processes(freed) == [(True, sorted(small().state_dict()))] * 2


HOLDS_A_COPY = """
import copy
import torch
from accel_core import AccelError, Accelerator
accelerator = Accelerator(device="cpu")
copied = copy.deepcopy(accelerator.prepare(torch.nn.Linear(4, 4)))
accelerator.backward(copied(torch.ones(2, 4)).sum())
accelerator.end_training()
assert copied.reducer is None
try:
    copied(torch.ones(2, 4))
except AccelError as error:
    assert "has ended" in str(error)
"""


@pytest.mark.full
def test_a_script_that_holds_a_copy_exits_with_zero(tmp_path: Path, run_command) -> None:
    script = tmp_path / "copies.py"
    script.write_text(HOLDS_A_COPY)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *torchrun, str(script)]
    result = run_command(command, capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
