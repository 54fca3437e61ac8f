"""A plain FSDP 2 program without an Accelerator: it saves and loads by `accel_core.storage`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_core.storage import async_save, load, save


def make(steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model sharded over all ranks, after some steps on the same batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    batch = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step, "note": [1, ("a", 2.5)]}


def whole_weights(model: nn.Module) -> list[Any]:
    return [tensor.full_tensor().tolist() for tensor in model.state_dict().values()]


def main(action: str, folder: str) -> None:
    dist.init_process_group("gloo")
    if action == "save":
        model, optimizer = make(steps=2)
        save(state_of(model, optimizer, 2), checkpoint_id=folder)
    elif action == "async":
        model, optimizer = make(steps=2)
        future = async_save(state_of(model, optimizer, 2), checkpoint_id=folder)
        train(model, optimizer, 2)  # the copy is of before
        future.result()
    elif action == "die":  # between the files of a second save and its manifest
        from accel_core.storage import pending

        model, optimizer = make(steps=2)
        save(state_of(model, optimizer, 2), checkpoint_id=folder)
        train(model, optimizer, 2)
        pending.commit = lambda *_: os._exit(9)  # type: ignore[assignment]
        save(state_of(model, optimizer, 3), checkpoint_id=folder)
    else:
        model, optimizer = make()
        state = state_of(model, optimizer, 0)
        load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert (state["step"], state["note"]) == (2, [1, ("a", 2.5)]), state
        train(model, optimizer, 2)
    weights = whole_weights(model)
    if dist.get_rank() == 0:
        Path(f"{folder}.{action}.txt").write_text(repr(weights))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
