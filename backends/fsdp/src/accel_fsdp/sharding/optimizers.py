"""Checks that an optimizer computes the same with the parts of weights that a rank has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from accel_core import requires_closure, step_granularity

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["refused"]

NOT_FOR_DTENSORS: Final = {"Adafactor": "take AdamW, or strategy ddp", "Rprop": "set fsdp.fsdp_version: 1"}
"""Optimizers with operations that torch lacks for DTensors -> remedy."""


def refused(
    optimizers: Sequence[Optimizer],
    version: int,
    names: Mapping[Tensor, str],
    *,
    device: torch.device,
    shards: int,
    cuts: bool,
    stages: bool,
) -> Iterator[str]:
    """Yield a reason and its remedy for each optimizer that would step wrongly, or fail.

    Args:
        optimizers: the optimizers of a unit.
        version: `fsdp_version`.
        names: parameter -> name.
        device: the device that the optimizers will step on.
        shards: the ranks over which a weight is sharded by its rows.
        cuts: several ranks share a weight.
        stages: ranks have weights that other ranks lack.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if version == 2 and (advice := _first(optimizer, NOT_FOR_DTENSORS)):
            yield f"{name} does not work on parameters of fsdp_version 2\n{advice}"
        elif version == 2 and (few := _with_few_rows(optimizer, shards)):
            yield (
                f"{name} cannot add to the rows of {names.get(few[0], 'a weight')} {[*few[0].shape]}, which"
                f" are sharded over {shards} ranks, so that some have none"
                + f" ({len(few)} such weights)"
                * (len(few) > 1)
                + "\ngive it to another optimizer, such as AdamW, as is usual for the last layer; or choose"
                " strategy ddp"
            )
        elif (cuts or stages) and requires_closure(optimizer):
            yield (
                f"{name} evaluates the loss several times per step, and computes with all weights of a model,"
                " of which each rank has a part\n"
                "take an optimizer that treats each element by itself, such as AdamW, or strategy ddp"
            )
        else:
            yield from _with_parts(optimizer, device, flat=version == 1 and cuts, stages=stages)


def _with_parts(optimizer: Optimizer, device: torch.device, *, flat: bool, stages: bool) -> Iterator[str]:
    """Yield a reason against an optimizer that needs more than a rank has.

    A rank has flat pieces of weights (flat), or only the weights of a pipeline stage (stages). Version 2
    without stages has neither: DTensors compute norms and products of whole weights.
    """
    granularity = step_granularity(optimizer, device) if flat or stages else "element"
    if granularity == "element" or (granularity == "tensor" and not flat):
        return
    name = type(optimizer).__name__
    needs, has = (
        ("whole weights", "fsdp_version 1 gives each rank a flat piece")
        if granularity == "tensor"
        else ("all weights of a model at once, or fails on small tensors", "each rank has a part")
    )
    other = "set fsdp.fsdp_version: 2, or " if flat and not _first(optimizer, NOT_FOR_DTENSORS) else ""
    yield (
        f"{name} computes with {needs}, of which {has}\n"
        f"{other}take an optimizer that treats each element by itself, such as AdamW, or strategy ddp; if"
        f" this {name} does, set its attribute: optimizer.elementwise = True"
    )


def _first(optimizer: Optimizer, advice: dict[str, str]) -> str | None:
    return next((advice[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in advice), None)


def _with_few_rows(optimizer: Optimizer, shards: int) -> list[Tensor]:
    """Return the weights that torch cannot change by whole matrices, as of Muon: ranks without a row."""
    if not any(kind.__name__ == "Muon" for kind in type(optimizer).__mro__):
        return []
    return [p for group in optimizer.param_groups for p in group["params"] if len(p) < shards]
