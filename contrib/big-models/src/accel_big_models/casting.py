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
        if isinstance(vars(module).get("forward"), _CastForward):
            raise ConfigError(
                f"layerwise_casting: {name} of the {type(model).__name__} is cast already\n"
                "call the function that the first call returned, then cast anew"
            )
    removals = [_cast(module, storage, compute) for module in chosen.values()]

    def remove() -> None:
        for removal in removals:
            removal()

    return remove


def _cast(layer: nn.Module, storage: torch.dtype, compute: torch.dtype) -> Callable[[], None]:
    layer.to(storage)
    before = vars(layer).get("forward")
    cast = _CastForward(layer, compute, before)
    vars(layer)["forward"] = cast

    def remove() -> None:
        cast.dtype = None  # others may have wrapped this forward
        if vars(layer).get("forward") is cast:
            del vars(layer)["forward"]
            if before is not None:
                vars(layer)["forward"] = before
        layer.to(compute)

    return remove


class _CastForward:
    """Forward of a layer with cast weights in it, for all threads that are inside.

    The cast is part of the graph: gradients reach the stored parameter. Hooks would not do: torch runs none
    after Ctrl-C, and the layer would keep weights that no optimizer steps.

    dtype: of the weights inside; None: they stay as they are. before: the layer's own, if not its class's.
    """

    def __init__(
        self, layer: nn.Module, dtype: torch.dtype | None, before: Callable[..., Any] | None
    ) -> None:
        self.layer, self.dtype, self.before = layer, dtype, before
        self.inside: set[object] = set()
        self.stored: dict[str, nn.Parameter | None] = {}
        self.lock = Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = object()
        try:
            self._enter(call)
            if self.before is not None:
                return self.before(*args, **kwargs)
            return type(self.layer).forward(self.layer, *args, **kwargs)
        finally:
            self._leave(call)

    def _enter(self, call: object) -> None:
        with self.lock:
            self.inside.add(call)
            if len(self.inside) == 1 and self.dtype is not None:
                self.stored = dict(self.layer._parameters)
                table: dict[str, Tensor | None] = self.layer._parameters  # type: ignore[assignment]
                table.update(
                    {name: None if it is None else it.to(self.dtype) for name, it in self.stored.items()}
                )

    def _leave(self, call: object) -> None:
        with self.lock:
            self.inside.discard(call)
            if not self.inside:
                self.layer._parameters.update(self.stored)
                self.stored = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"layer": self.layer, "dtype": self.dtype, "before": self.before}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
