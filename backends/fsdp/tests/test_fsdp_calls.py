"""Calls in any order that plain PyTorch allows give what it gives with both ranks' batches, in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from accel_core import Accelerator
from accel_fsdp import FullyShardedDataParallelPlugin
from accel_testing.random_programs import Net

pytestmark = pytest.mark.full

ROWS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "version 2": {},
    "version 2, in blocks": {"min_num_params": 10},
    "version 2, kept gathered": {"min_num_params": 10, "reshard_after_forward": False},
    "version 1": {"fsdp_version": 1},
    "version 1, in blocks": {"fsdp_version": 1, "min_num_params": 10},
    "version 1, kept gathered": {
        "fsdp_version": 1,
        "min_num_params": 10,
        "sharding_strategy": "SHARD_GRAD_OP",
    },
    "version 1, whole": {"fsdp_version": 1, "min_num_params": 10, "sharding_strategy": "NO_SHARD"},
}
CALLS = {
    "the optimizer's zero_grad between forward and backward": "backward forward-zero-backward step",
    "the model's zero_grad between forward and backward": "backward step forward zero-model backward step",
    "and in place": "backward step forward zero-model-in-place backward step",
    "zero_grad in place after a backward in no_sync": "backward no_sync zero-in-place backward step",
    "and of the model": "backward no_sync zero-model-in-place backward step",
    "frozen after a forward": "forward freeze backward step backward step",
    "trained again after a forward": "freeze forward unfreeze backward step backward step",
    "weights read before the first forward": "read backward step",
    "weights read between forward and backward": "forward read backward step",
}
KINDS = (
    *("backward",) * 3,
    *("no_sync", "step") * 2,
    *("forward", "evaluate", "read"),
    *("zero", "forward-zero-backward", "zero-in-place", "zero-model", "zero-model-in-place"),
    *("freeze", "unfreeze"),
)


def random_calls(seed: int, *, freezes: bool) -> list[str]:
    draw, calls, unreduced = random.Random(seed), [], False
    for _ in range(14):
        kind = draw.choice(KINDS if freezes else KINDS[:-2])
        if kind == "step" and unreduced:
            calls.append("backward")
        calls.append(kind)
        unreduced = kind == "no_sync" or (unreduced and kind not in ("backward", "step"))
    return [*calls, "backward", "step"]


def weights_after(calls: Sequence[str], accelerator: Accelerator | None) -> list[dict[str, Tensor]]:
    """Return whole weights after each step; without an accelerator those of plain PyTorch."""
    torch.manual_seed(0)
    net = Net().double()
    model, optimizer, rows, found = net, SGD(net.parameters(), lr=0.1), slice(None), []
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        rows = slice(begin := accelerator.process_index * ROWS, begin + ROWS)

    def weights() -> dict[str, Tensor]:
        state = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
        return {name: value.detach().clone() for name, value in state.items()}

    for number, call in enumerate(calls):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(2 * ROWS, 6, generator=generator, dtype=torch.float64)[rows]
        if call in ("backward", "no_sync"):
            with nullcontext() if accelerator is None or call == "backward" else accelerator.no_sync(model):
                loss = (model(x) - 1).pow(2).mean()
                loss.backward() if accelerator is None else accelerator.backward(loss)
        elif call == "forward-zero-backward":
            loss = (model(x) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward() if accelerator is None else accelerator.backward(loss)
        elif call == "forward":
            model(x)
        elif call == "evaluate":
            with torch.no_grad():
                model(x)
        elif call == "read":
            weights()
        elif call in ("freeze", "unfreeze"):
            net.second.requires_grad_(call == "unfreeze")
        elif call.startswith("zero"):
            (model if "model" in call else optimizer).zero_grad(set_to_none="place" not in call)
        else:
            optimizer.step()
            found.append(weights())
    return found


def trained(options: dict[str, Any], programs: Sequence[Sequence[str]]) -> list[list[dict[str, Tensor]]]:
    found = []
    for calls in programs:
        accelerator = Accelerator(cpu=True, plugins=[FullyShardedDataParallelPlugin(**options)])
        found.append(weights_after(calls, accelerator))
        accelerator.end_training()
    return found


def assert_plain(run_processes, options: dict[str, Any], programs: Sequence[Sequence[str]]) -> None:
    wanted = [weights_after(calls, None) for calls in programs]
    for found in run_processes(trained, options, programs):
        for calls, steps, plain_steps in zip(programs, found, wanted, strict=True):
            for ours, plain in zip(steps, plain_steps, strict=True):
                for name, value in plain.items():
                    assert (ours[name] - value).abs().max() < 1e-12, f"{name} after {' '.join(calls)}"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_calls_train_as_in_plain_pytorch(options: dict[str, Any], run_processes) -> None:
    assert_plain(run_processes, options, [calls.split() for calls in CALLS.values()])


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_random_calls_train_as_in_plain_pytorch(options: dict[str, Any], run_processes) -> None:
    """Version 1 drops the gradients of what is frozen."""
    freezes = "fsdp_version" not in options
    assert_plain(run_processes, options, [random_calls(seed, freezes=freezes) for seed in range(10)])
