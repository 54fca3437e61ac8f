"""Parameters inside the flat vectors of fsdp_version 1, and their local parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  as everybody calls it

from accel_core import flat_range

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from accel_core import Leaf, Unit

__all__ = ["Part", "is_elsewhere", "modules_of", "name_parameters", "parameters_of", "parts_of"]


def modules_of(unit: Unit) -> list[FSDP]:
    """Return the wrapped modules that hold parameters of their own."""
    wrapped = [model for model in unit.wrapped if isinstance(model, FSDP)]
    for model in wrapped:
        model.check_is_root()  # else, before its first forward, torch takes a block for a model by itself
    found = [module for model in wrapped for module in FSDP.fsdp_modules(model) if module._handle is not None]
    for module in found:
        name_parameters(module._handle)
    return found


def name_parameters(handle: Any) -> None:
    """Give modules their parameters back.

    A forward may have left gathered weights in their places. If nothing is cut, torch does not say so.
    """
    if handle._skipped_use_sharded_views or not handle.uses_sharded_strategy:
        handle.reshard(handle.uses_sharded_strategy)


def parameters_of(module: FSDP) -> list[nn.Parameter]:
    """Return the user's parameters in the module's flat vector."""
    flat: Any = module._handle.flat_param  # type: ignore[union-attr]
    return list(flat._params)


@frozen
class Part:
    """A rank's elements of a parameter: from `start` on, in memory order.

    strides: of the whole, before it became a part of a flat vector.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def leaf(self, elements: Tensor, *, replicated: bool) -> Leaf:
        """elements (n,): this rank's, of the parameter or of something like it."""
        return flat_range(elements, self.shape, self.start, strides=self.strides, replicated=replicated)


def is_elsewhere(parameter: nn.Parameter, parts: Mapping[nn.Parameter, Part]) -> bool:
    """Return True if only other ranks have elements of the parameter."""
    return parameter in parts and not parameter.numel() and 0 not in parts[parameter].shape


def parts_of(unit: Unit) -> dict[nn.Parameter, Part]:
    """Return this rank's part of each sharded parameter."""
    found = {}
    for module in modules_of(unit):
        handle: Any = module._handle
        if handle.uses_sharded_strategy:
            flat = handle.flat_param
            for parameter, shape, strides, shard in zip(
                flat._params, flat._shapes, flat._strides, flat._shard_param_infos, strict=True
            ):
                start = shard.intra_param_start_idx or 0
                found[parameter] = Part(tuple(shape), tuple(strides), start)
    return found
