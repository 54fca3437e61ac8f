"""Whole weights of a model, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from accel_big_models.composing import values_of
from accel_big_models.hooks import enters_of
from accel_core import AccelError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["persistent_buffers", "weights_of"]


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each parameter and persistent buffer, one by one.

    Tied weights come once, under their first name. A tensor is never on the meta device: it is the model's
    own, a view of a file, or read for the caller. Values may not be changed.

    Raises:
        AccelError: a weight is on the meta device and in no file.
    """
    sources = {
        id(weight.tensor): weight.fresh()
        for enter in enters_of(model)
        if enter.engine is not None
        for weight in enter.engine.weights
    }
    seen: set[int] = set()
    for name, tensor in chain(model.named_parameters(), persistent_buffers(model)):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        source = sources.get(id(tensor))
        if source is None and tensor.is_meta:
            raise AccelError(
                f"{name} of the {type(model).__name__} is on the meta device and has no values\n"
                "load a checkpoint that has it: accel_big_models.load(model, checkpoint)"
            )
        yield name, tensor.detach() if source is None else values_of(source)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each buffer that belongs to a state dict, by each of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
