"""The checks of level 1 of a device, in one process."""

from __future__ import annotations

import gc
import pkgutil
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core import DataLoaderConfiguration, set_seed
from accel_testing.kit.tasks import make

__all__ = [
    "chosen",
    "memory",
    "placed",
    "profiled",
    "random_streams",
    "seeded",
    "seeded_streams",
    "services",
    "waits",
]


class Pair(NamedTuple):
    """A batch of a user's own type."""

    first: Any
    second: Any


def chosen(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device of the run, and what the plugin says of it."""
    accelerator = make(arguments)
    device, hooks = accelerator.device, accelerator.run.hooks
    found = {
        "type": device.type,
        "indexed": device.type == "cpu" or device.index is not None,
        "computes": (torch.ones(3, device=device) * 2).sum().item(),
        "capabilities": sorted(hooks.capabilities(device)),
    }
    accelerator.end_training()
    return found


def placed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare a model, and compare parameters, buffers, gradients, tied weights."""
    accelerator = make(arguments)
    # 16 features, which precisions that multiply by blocks can multiply too.
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False))
    model[2].weight = model[0].weight
    frozen = model[1].weight
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(prepared(torch.ones(2, 16, device=accelerator.device)).float().pow(2).sum())
    inner: Any = accelerator.unwrap_model(prepared)
    tensors = [
        *inner.parameters(),
        *inner.buffers(),
        *(p.grad for p in inner.parameters() if p.grad is not None),
    ]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = {
        "devices": sorted({tensor.device.type for tensor in tensors}),
        "tied": inner[0].weight is inner[2].weight,
        "frozen": not inner[1].weight.requires_grad and inner[1].weight.grad is None,
        "optimizer holds the parameters": held == {id(p) for p in inner.parameters() if p.requires_grad},
        "type": accelerator.device.type,
    }
    accelerator.end_training()
    return found


def seeded(arguments: Mapping[str, Any]) -> list[list[float]]:
    """Draws on the device after one seed, the same again, and after another."""
    accelerator = make(arguments)
    draws = []
    for seed in (7, 7, 8):
        set_seed(seed)
        draws.append(torch.rand(4, device=accelerator.device).cpu().tolist())
    accelerator.end_training()
    return draws


def random_streams(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved streams, and True if drawing goes on from where they were saved."""
    accelerator = make(arguments)
    streams, device = accelerator.run.hooks.random_streams(), accelerator.device
    set_seed(3)
    torch.rand(5, device=device)
    saved = {name: stream.get().clone() for name, stream in streams.items()}
    first = (torch.rand(4, device=device).cpu(), torch.rand(4))
    for name, state in saved.items():
        streams[name].set(state)
    second = (torch.rand(4, device=device).cpu(), torch.rand(4))
    found = {
        "types": sorted({f"{state.dtype} {state.device.type}" for state in saved.values()}),
        "device stream": torch.equal(first[0], second[0]),
        "host stream": torch.equal(first[1], second[1]),
    }
    accelerator.end_training()
    return found


def seeded_streams(arguments: Mapping[str, Any]) -> dict[str, list[str]]:
    """List streams of the stack that a seed does not set, or that stay as they were."""
    accelerator = make(arguments)
    streams = accelerator.run.hooks.random_streams()

    def read() -> dict[str, Tensor]:
        return {name: stream.get().clone() for name, stream in streams.items()}

    states = []
    for seed in (3, 4, 3):
        set_seed(seed)
        states.append(read())
    first, other, again = states
    for name, state in other.items():
        streams[name].set(state)
    restored = read()
    accelerator.end_training()
    return {
        "not repeated by a seed": [name for name in first if not torch.equal(first[name], again[name])],
        "the same under another seed": [name for name in first if torch.equal(first[name], other[name])],
        "not restored": [name for name in other if not torch.equal(other[name], restored[name])],
    }


def memory(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """memory_stats before, with, and after a tensor of 4 MB."""
    accelerator = make(arguments)
    hooks, device = accelerator.run.hooks, accelerator.device
    stats = [dict(hooks.memory_stats(device))]
    tensor = torch.ones(1_000_000, device=device)
    stats.append(dict(hooks.memory_stats(device)))
    del tensor
    gc.collect()
    stats.append(dict(hooks.memory_stats(device)))
    found = {"claimed": "memory_stats" in hooks.capabilities(device), "stats": stats}
    accelerator.end_training()
    return found


def float8(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Multiply float8 matrices, unless the card offers to and this chip cannot.

    Returns `multiplied`, and `error`, the relative one, if it is True.
    """
    accelerator = make(arguments)
    device, run = accelerator.device, accelerator.run
    lacks = "fp8" in run.stack.device.card.offers and "fp8" not in run.hooks.capabilities(device)
    found: dict[str, Any] = {"multiplied": not lacks}
    if found["multiplied"]:
        left, right = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
        one = torch.ones((), device=device)
        factors = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        product = torch._scaled_mm(*factors, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        exact = left @ right.t()
        found["error"] = ((product.float() - exact).norm() / exact.norm()).item()
    accelerator.end_training()
    return found


def services(arguments: Mapping[str, Any]) -> list[str]:
    """Call every service; the answers are the device's affair."""
    accelerator = make(arguments)
    path = accelerator.run.stack.device.card.environment_report
    lines = {} if path is None else pkgutil.resolve_name(path)()
    report = [f"{key}={value}" for key, value in lines.items()]
    accelerator.free_memory()
    accelerator.end_training()
    return report


def waits(arguments: Mapping[str, Any]) -> str:
    """Train a loop; return what the host waited for from the second window on, or "".

    Runs in one process without a strategy, in float32, as a loss scaler has to wait. A device whose module
    has no `set_sync_debug_mode` cannot tell.
    """
    loading = DataLoaderConfiguration(non_blocking=True)
    changes = {"strategy": "single", "mixed_precision": "no", "gradient_accumulation_steps": 2}
    accelerator = make(arguments, **changes, dataloader_config=loading)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, DataLoader(data))
    module = getattr(torch, accelerator.device.type, None)  # torch gives some devices none
    set_mode = getattr(module, "set_sync_debug_mode", lambda mode: None)
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    found = ""
    try:
        for number, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if number == 1:
                set_mode("error")
    except RuntimeError as error:
        found = str(error)
    finally:
        set_mode("default")
    accelerator.end_training()
    return found


def profiled(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names that the profiler records of an addition on the device."""
    accelerator = make(arguments)
    with accelerator.profile() as profiler:
        torch.ones(8, device=accelerator.device) + 1
    names = [event.key for event in profiler.key_averages()]
    accelerator.end_training()
    return names
