"""Weights that the user writes between steps, and the copies of them that the optimizer inside steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch

from accel_deepspeed.optimizer_shards import fragments, live_part

if TYPE_CHECKING:
    from torch import nn

    from accel_core import Unit

__all__ = ["keep_loaded", "keep_written"]


def keep_loaded(unit: Unit) -> Callable[[], None]:
    """Have `load_state_dict` of the model, or of a part, write the copies too (stages 0 to 2).

    The returned function ends it.
    """
    names = {parameter: name for name, parameter in unit.named_parameters().items()}

    def keep(part: nn.Module, keys: Any) -> None:
        if loaded := [names[each] for each in part.parameters(recurse=False) if each in names]:
            keep_written(unit, loaded)

    handles = [part.register_load_state_dict_post_hook(keep) for part in unit.models[0].modules()]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


@torch.no_grad()
def keep_written(unit: Unit, names: Collection[str]) -> None:
    """Write these weights, as forward has them, into the copies that are stepped.

    Elements that were not edited keep the digits that forward's copy has no place for.
    """
    for fragment in fragments(unit):
        if fragment.name in names:
            master = fragment.cut(fragment.flat)
            written = live_part(fragment).to(master.device)
            master.copy_(torch.where(master.to(written.dtype) == written, master, written.to(master.dtype)))
