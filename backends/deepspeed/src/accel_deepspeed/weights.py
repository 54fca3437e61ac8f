"""An engine's weights, whole.

For a moment in the user's own modules, or one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from accel_deepspeed.edits import keep_written
from accel_deepspeed.experts import elsewhere

if TYPE_CHECKING:
    from accel_core import Leaf, Unit

__all__ = ["gathered", "keep_available", "whole_weights"]

_USER: Final = "full_parameters"


@contextmanager
def gathered(unit: Unit, names: set[str], *, writeback: bool) -> Iterator[None]:
    """Make a context with whole weights, in the precision of forward. Collective.

    Changes that rank 0 makes are kept, by the masters too.
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    (engine,) = unit.wrapped
    named = unit.named_parameters()
    partitioned: list[Any] = [named[name] for name in names if hasattr(named[name], "ds_tensor")]
    with GatheredParameters(partitioned, modifier_rank=0 if writeback else None):
        for parameter in partitioned:  # else a forward inside would let go of it
            parameter.ds_active_sub_modules.add(_USER)
        try:
            yield
        finally:
            for parameter in partitioned:
                parameter.ds_active_sub_modules.discard(_USER)
    if writeback:
        keep_written(unit, names)
    if partitioned:
        keep_available(engine.optimizer)


def keep_available(optimizer: Any) -> None:
    """Gather stage 3's small weights, which must be whole between steps. Collective."""
    if parameters := optimizer.persistent_parameters:
        parameters[0].all_gather(parameters)


def whole_weights(
    unit: Unit, leaves: Mapping[str, Leaf], dtype: torch.dtype | None, to: torch.device | None
) -> Iterator[tuple[str, Tensor]]:
    """Whole weights one by one, as forward computes with them. Collective.

    If the masters' dtype is asked for, these are the masters' digits.
    """
    run, parameters = unit.run, unit.named_parameters() | elsewhere(unit)
    for name, leaf in leaves.items():
        if name in parameters:
            tensor = torch.zeros(leaf.global_shape, dtype=dtype or parameters[name].dtype, device=run.device)
            for offset, part in leaf.shards:
                box = tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
                tensor[box] = part
            # Each byte comes from one rank, or is the same on several: the largest is the right one.
            run.collectives("world").all_reduce(tensor.view(-1).view(torch.uint8), "max")
        else:
            ((_, tensor),) = leaf.shards
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
        yield name, tensor.to(to or run.device)
