"""Weights stored in one dtype and computed in another."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor, nn

from accel_core import ConfigError

__all__ = ["CAST_LAYERS", "layerwise_casting"]

CAST_LAYERS: Final = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""Layers whose arithmetic bears weights of few bits: products of matrices."""


def layerwise_casting(
    model: nn.Module, storage: torch.dtype, compute: torch.dtype, *, skip: Collection[str] = ()
) -> Callable[[], None]:
    """Store the weights of linear and convolutional layers in `storage`.

    Each layer's weights are cast to `compute` for the duration of its forward, and gradients reach the stored
    weights. Norms and embeddings stay as they are. State dicts have the stored weights.

    Args:
        model: changed in place; each layer takes inputs of dtype `compute`.
        storage: such as torch.float8_e4m3fn.
        compute: such as torch.bfloat16.
        skip: regular expressions; a layer stays as it is if one is found in its name.

    Returns:
        A function that takes the casting off again; the weights then have dtype `compute`.

    Raises:
        ConfigError: no layer is left, or a layer is cast already.
    """
    chosen = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, CAST_LAYERS) and not any(re.search(pattern, name) for pattern in skip)
    }
    if not chosen:
        raise ConfigError(
            f"layerwise_casting: the {type(model).__name__} has no linear or convolutional layer that"
            " skip= leaves\nname fewer layers in skip="
        )
    for name, module in chosen.items():
        if any(isinstance(hook, _Cast) for hook in module._forward_pre_hooks.values()):
            raise ConfigError(
                f"layerwise_casting: {name} of the {type(model).__name__} is cast already\n"
                "call the function that the first call returned, then cast anew"
            )
    removals = [_cast(module, storage, compute) for module in chosen.values()]

    def remove() -> None:
        for removal in removals:
            removal()

    return remove


def _cast(module: nn.Module, storage: torch.dtype, compute: torch.dtype) -> Callable[[], None]:
    module.to(storage)
    cast = _Cast(compute)
    handles = (
        module.register_forward_pre_hook(cast),
        # First of all, so that the weights are back whatever other hooks do.
        module.register_forward_hook(_Restore(cast), prepend=True, always_call=True),
    )

    def remove() -> None:
        for handle in handles:
            handle.remove()
        module.to(compute)

    return remove


class _Cast:
    """Puts cast weights into the layer, for all threads that are inside it.

    The cast is part of the graph: gradients reach the stored parameter.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.inside = 0
        self.stored: dict[str, nn.Parameter | None] = {}
        self.lock = Lock()

    def __call__(self, module: nn.Module, args: Any) -> None:
        with self.lock:
            if not self.inside:
                self.stored = dict(module._parameters)
                table: dict[str, Tensor | None] = module._parameters  # type: ignore[assignment]
                table.update(
                    {name: None if it is None else it.to(self.dtype) for name, it in self.stored.items()}
                )
            self.inside += 1

    def leave(self, module: nn.Module) -> None:
        """Put the stored weights back once no thread is inside."""
        with self.lock:
            if self.inside:
                self.inside -= 1
                if not self.inside:
                    module._parameters.update(self.stored)
                    self.stored = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"dtype": self.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _Restore:
    """Puts the stored weights back after the layer's forward, or after its error."""

    def __init__(self, cast: _Cast) -> None:
        self.cast = cast

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.cast.leave(module)
