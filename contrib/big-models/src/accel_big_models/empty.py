"""Models whose parameters are on the meta device: they have shapes and no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["empty_weights"]


@contextmanager
def empty_weights() -> Iterator[None]:
    """Put parameters on the meta device while the context lasts, in this thread only.

    A module that is built inside has parameters with shapes and dtypes and without memory. Tied weights
    stay tied. Buffers have their values: rotary frequencies and masks need no checkpoint.
    """
    thread, made = get_ident(), WeakIdKeyDictionary()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if get_ident() != thread or parameter.is_meta:
            return None
        if parameter not in made:  # a parameter that two modules share is registered twice
            made[parameter] = _emptied(parameter)
        return made[parameter]  # type: ignore[no-any-return]

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # it may replace the parameter
    try:
        yield
    finally:
        handle.remove()


def _emptied(parameter: nn.Parameter) -> nn.Parameter:
    data = torch.empty_like(parameter.detach(), device="meta")
    empty = nn.Parameter(data, requires_grad=parameter.requires_grad)
    empty.__class__ = type(parameter)
    empty.__dict__.update(parameter.__dict__)
    return empty
