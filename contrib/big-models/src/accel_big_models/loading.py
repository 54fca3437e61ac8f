"""A checkpoint's weights in their places, straight from file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING

import torch

from accel_big_models.arranging import arrange
from accel_big_models.blocks import named_tensors
from accel_big_models.checkpoints import open_checkpoint, with_dtype
from accel_big_models.composing import values_of
from accel_big_models.converting import convert_blocks, unchanged_on_error
from accel_big_models.planning import plan_from_map
from accel_big_models.sources import Source
from accel_big_models.tenants import Tenant, tenants_of
from accel_big_models.weights import persistent_buffers
from accel_core import CheckpointError, show_progress

if TYPE_CHECKING:
    from torch import nn

    from accel_big_models.converting import Convert
    from accel_big_models.plans import Plan

__all__ = ["load"]


def load(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    plan: Plan | None = None,
    *,
    strict: bool = True,
    mapped: bool = True,
    skip_keys: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
    convert: Convert | None = None,
) -> nn.Module:
    """Load a checkpoint's weights to the places of a plan, and dispatch the model.

    Nothing is copied on disk. On the CPU, weights are views of the mapped file. Weights on "disk" stay in
    the file; see `dispatch` for how they are computed. The model changes when everything has been read: an
    error leaves it as it was. Weights that the plan puts nowhere else keep their tensors' identity, ties
    and `requires_grad`.

    Args:
        model: on the meta device, as `empty_weights` makes it, or with weights that are overwritten.
        checkpoint: a safetensors file, a file of `torch.save`, an index of shards, a folder with one of
            them, a checkpoint of accel-core, or an offload folder of Accelerate.
        plan: the place of each part; None: all of it on the CPU.
        strict: names that only the model or only the checkpoint has are an error.
        mapped: False reads files instead of mapping them: a file that is cut later then raises an error,
            where a mapped one ends the process.
        skip_keys: see `dispatch`.
        progress: called with the bytes that are loaded and those of all. Unset, they are shown as
            `accel_core.show_progress` does.
        convert: `convert(name, block)` gets each block of the plan with its weights on its device, and
            returns it, or the module that takes its place. What it makes, such as quantised weights, stays
            there; one block at a time has its weights as the checkpoint has them. What it makes of parts
            on "cpu" and "disk" leaves the device at once, for host memory or a file that ends with the model.
            Tied weights must stay as they are.

    Returns:
        The model.

    Raises:
        CheckpointError: a file is damaged or cut, names or shapes differ; names the file and the weights.
        ConfigError: the plan or what `convert` did cannot be; names the block or the weight.
    """
    sources = open_checkpoint(checkpoint, mapped=mapped)
    chosen = plan if plan is not None else plan_from_map(model, {"": "cpu"})
    tenants = tenants_of(model, chosen)
    kept = {
        name for name, _ in chain(model.named_parameters(remove_duplicate=False), persistent_buffers(model))
    }
    names = _names(model, tenants)
    _compare(model, checkpoint, names, sources, kept, strict=strict)
    for tenant in tenants:
        name = next((name for name in names[tenant] if name in sources and name in kept), None)
        if name is not None:
            dtype = (
                chosen.dtype if chosen.dtype and tenant.tensor.is_floating_point() else tenant.tensor.dtype
            )
            tenant.source = with_dtype(sources[name], dtype)
    loaded = (0, 0)

    def told(done: int, total: int) -> None:
        nonlocal loaded
        loaded = done, total
        if progress is not None:
            progress(done, total)

    shown = nullcontext() if progress is not None else show_progress(f"loading {checkpoint}", lambda: loaded)
    with shown, unchanged_on_error(model) if convert is not None else nullcontext():
        if convert is not None:
            tenants = convert_blocks(model, chosen, tenants, convert, told, mapped=mapped)
        callback = told if convert is None else None
        arrange(model, chosen, tenants, None, mapped=mapped, skip_keys=skip_keys, progress=callback)
    return model


def _names(model: nn.Module, tenants: Sequence[Tenant]) -> dict[Tenant, list[str]]:
    """Return each tensor's names, also those by modules that have several names."""
    found: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model).items():
        found.setdefault(id(tensor), []).append(name)
    return {tenant: found[id(tenant.tensor)] for tenant in tenants}


def _compare(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    names_of: Mapping[Tenant, Sequence[str]],
    sources: Mapping[str, Source],
    kept: AbstractSet[str],
    *,
    strict: bool,
) -> None:
    """Raise CheckpointError where names, shapes or kinds of numbers differ."""
    problems = []
    known = {name for names in names_of.values() for name in names}
    lost = {
        it: names[0]
        for it, names in names_of.items()
        if not kept.isdisjoint(names) and sources.keys().isdisjoint(names)
    }
    if lost and (strict or any(it.tensor.is_meta for it in lost)):
        problems.append(f"it lacks {_listed([*lost.values()])}")
    if strict and (extra := [name for name in sources if name not in known]):
        problems.append(f"the model lacks {_listed(extra)}")
    for tenant, names in names_of.items():
        there = [name for name in names if name in sources]
        for name in there:
            have, want = sources[name], tenant.tensor
            if have.shape != tuple(want.shape):
                problems.append(f"{name} has shape {list(have.shape)}, and the model's {list(want.shape)}")
            elif not _holds(want.dtype, have.dtype):
                problems.append(f"{name} has {have.dtype}, and the model's {want.dtype}")
        if not problems and any(_differ(sources[there[0]], sources[name]) for name in there[1:]):
            problems.append(
                f"{' and '.join(there)} are one tensor in the model, and differ in the checkpoint"
            )
    if problems:
        raise CheckpointError(
            f"{os.fspath(checkpoint)} is not a checkpoint of this {type(model).__name__}:"
            f" {'; '.join(problems[:8])}\n"
            "give the checkpoint of this model, or strict=False to leave out names that only one of them has",
            path=os.fspath(checkpoint),
        )


def _holds(kind: torch.dtype, other: torch.dtype) -> bool:
    """Return True if another dtype's numbers can be loaded as this one.

    Integers are never cut.
    """
    inexact = kind.is_floating_point or kind.is_complex or other.is_floating_point or other.is_complex
    if kind == other or inexact:
        return (kind.is_floating_point, kind.is_complex) == (other.is_floating_point, other.is_complex)
    if torch.bool in (kind, other):
        return other == torch.bool
    wide, narrow = torch.iinfo(kind), torch.iinfo(other)
    return wide.min <= narrow.min and narrow.max <= wide.max


def _differ(first: Source, second: Source) -> bool:
    if first is second:
        return False
    one, other = values_of(first), values_of(second)
    return one.data_ptr() != other.data_ptr() and not torch.equal(one, other)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
