"""Weights in the places of a plan: first made, then all put in at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from accel_big_models.away import guard
from accel_big_models.blocks import is_called
from accel_big_models.composing import Composed, leaves_of, sourced, values_of
from accel_big_models.engine import Engine, Group, Weight
from accel_big_models.hooks import Enter, attach, enters_of
from accel_big_models.moving import Cargo, pinned
from accel_big_models.plans import Plan
from accel_big_models.sources import InMemory
from accel_big_models.swapping import put
from accel_big_models.tenants import Tenant
from accel_big_models.writing import write_blocks
from accel_core import ConfigError, is_out_of_memory

__all__ = ["READERS", "arrange"]

READERS: Final = 4
"""Threads that read weights; more of them take longer on common disks."""


def arrange(
    model: nn.Module,
    plan: Plan,
    tenants: Sequence[Tenant],
    folder: str | os.PathLike[str] | None,
    *,
    mapped: bool,
    skip_keys: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Bring all tensors to their places; the model changes at the end, or not at all."""
    if enters_of(model):
        raise ConfigError(
            f"the {type(model).__name__} is dispatched already\n"
            "take that off first: accel_big_models.undo(model)"
        )
    if empty := [it.names[0] for it in tenants if it.tensor.is_meta and it.source is None]:
        raise ConfigError(
            f"{empty[0]} of the {type(model).__name__} is on the meta device and has no values"
            + (f", as have {len(empty) - 1} more" if len(empty) > 1 else "")
            + "\nload a checkpoint that has them: accel_big_models.load(model, checkpoint, plan)"
        )
    written = [it for it in tenants if it.is_streamed and it.place == "disk" and it.source is None]
    for tenant, source in zip(
        written, write_blocks([it.tensor for it in written], folder, mapped=mapped), strict=True
    ):
        tenant.source = source
    data = _read(tenants, progress)
    _require_composable(tenants)
    for tenant, values in zip(tenants, data, strict=True):
        if values is not None:
            put(tenant.tensor, values)
    _attach(model, plan, tenants, skip_keys)


def _require_composable(tenants: Sequence[Tenant]) -> None:
    """Refuse tensors made of others that cannot be made of views of a buffer."""
    for tenant in tenants:
        if tenant.is_streamed and isinstance(tenant.source, Composed):
            cargo = Cargo(tenant.names[0], [tenant.source])
            try:
                cargo.unpacked(torch.empty(cargo.size, dtype=torch.uint8, device="meta"))
            except Exception as error:
                kind = type(tenant.tensor).__name__
                raise ConfigError(
                    f"{tenant.names[0]} is a {kind}, which cannot come and go: {error}\n"
                    "keep it on the device: name its module in the device map"
                ) from error


def _read(tenants: Sequence[Tenant], progress: Callable[[int, int], None] | None) -> list[Tensor | None]:
    """Return the data of each tensor in its place; None where it stays in its file."""
    sizes = [it.tensor.numel() * it.dtype.itemsize for it in tenants]
    total, done = sum(sizes), 0
    found: list[Tensor | None] = []
    with ThreadPoolExecutor(READERS, "accel-big-models-load") as pool:
        pending = [pool.submit(_made, tenant) for tenant in tenants]
        try:
            for future, size in zip(pending, sizes, strict=True):
                found.append(future.result())
                done += size
                if progress is not None:
                    progress(done, total)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return found


def _made(tenant: Tenant) -> Tensor | None:
    with torch.inference_mode(False), torch.no_grad():
        if tenant.is_streamed:
            if tenant.place == "cpu":
                values = tenant.tensor.detach().cpu() if tenant.source is None else values_of(tenant.source)
                leaves = (pinned(leaf, tenant.device) for leaf in leaves_of(values))
                tenant.source = sourced(values, (InMemory(leaf, leaf.dtype) for leaf in leaves))
            return None
        if tenant.source is None and tenant.tensor.device == tenant.device:
            return None
        values = tenant.tensor if tenant.source is None else values_of(tenant.source)
        try:
            return values.detach().to(tenant.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size = tenant.tensor.numel() * tenant.dtype.itemsize
            raise torch.OutOfMemoryError(
                f"no memory on {tenant.device} for {tenant.names[0]}, {size} bytes: {error}\n"
                "give less of its memory to the plan, or places for these blocks elsewhere"
            ) from error


def _attach(model: nn.Module, plan: Plan, tenants: Sequence[Tenant], skip_keys: Sequence[str]) -> None:
    """Put hooks on blocks whose weights come and go, and where inputs change devices."""
    modules = dict(model.named_modules(remove_duplicate=False))
    weights: dict[str, list[Weight]] = {}
    outer: set[str] = set()
    for tenant in tenants:
        if tenant.is_streamed:
            assert tenant.source is not None
            home = _common([block.name for block in tenant.blocks])
            while home and not is_called(modules[home]):
                home = home.rpartition(".")[0]
            weights.setdefault(home, []).append(Weight(tenant.names[0], tenant.tensor, tenant.source))
            if home not in {block.name for block in tenant.blocks if not block.divided}:
                outer.add(home)
    order = {name: number for number, name in enumerate(modules)}
    groups = [Group(name, weights[name], name in outer) for name in sorted(weights, key=order.__getitem__)]
    devices = _devices(plan, tenants)
    several = len(set(devices.values())) > 1
    if not groups and not several and set(devices.values()) <= {torch.device("cpu")}:
        return
    engine = Engine(plan.device, groups) if groups else None
    make = partial(Enter, engine, device=None, root=False, skip_keys=skip_keys)
    attached = {group.name: make(group) for group in groups}
    for name in devices if several else ():
        attached.setdefault(name, make(None)).device = devices[name]
    root = attached.setdefault("", make(None))
    root.root = True
    root.device = root.device or next(iter(devices.values()))
    for name, enter in attached.items():
        attach(modules[name], enter)
    if engine is not None:
        guard(model, {id(weight.tensor): weight for weight in engine.weights}, engine.device)


def _devices(plan: Plan, tenants: Sequence[Tenant]) -> Mapping[str, torch.device]:
    """Return block -> the device that computes it, in the order of the model."""
    devices: dict[str, torch.device] = {}
    for tenant in tenants:
        for block in tenant.blocks:
            if not block.divided:
                devices.setdefault(block.name, tenant.device)
    return devices or {"": plan.device}


def _common(names: Sequence[str]) -> str:
    """Return the name of the innermost module that holds, or is, all of these."""
    parts = [name.split(".") if name else [] for name in names]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common)
