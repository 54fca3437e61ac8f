"""How a model's forward comes under the stack's autocast contexts: by a method of the module, `forward`.

The method is bound to this one module: a deep copy of the model (EMA) has its own, a pickle has the class's.
Hooks would not do: torch runs none when a forward ends by KeyboardInterrupt or another exception that is
no `Exception`, and autocast would stay on for all that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from accel_core.distributed.nested import convert_to_fp32

if TYPE_CHECKING:
    from torch import nn

__all__ = ["attach"]

Factory = Callable[[], AbstractContextManager[Any]]


def attach(
    model: nn.Module, factory: Factory | None, outputs_to_fp32: str | None
) -> Callable[[], None] | None:
    """Enter `factory()` around each forward of `model`; the result takes it off again.

    outputs_to_fp32: a device type; outputs under its autocast are converted to float32. None: none are.
    """
    if factory is None:
        return None
    before, forward = model.__dict__.get("forward"), _function(model)

    def compilable(
        *args: Any, **kwargs: Any
    ) -> Any:  # a frame that compilers look at, where `forward` is torch's own
        return forward(*args, **kwargs)

    # Contexts may do anything, which no compiler follows: they are entered around what is compiled.
    converted = torch.compiler.disable(convert_to_fp32)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    @wraps(forward)
    def under_contexts(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with factory():
            output = compilable(self, *args, **kwargs)
            if outputs_to_fp32 is not None and torch.is_autocast_enabled(outputs_to_fp32):
                output = converted(output)
        return output

    under_contexts.__name__ = "forward"  # by this name a pickle finds the class's
    model.__dict__["forward"] = mine = MethodType(under_contexts, model)

    def detach() -> None:
        if model.__dict__.get("forward") is mine:
            del model.__dict__["forward"]
            if before is not None:
                model.__dict__["forward"] = before

    return detach


def _function(model: nn.Module) -> Callable[..., Any]:
    """The model's forward, as a function of the module too: a copy of the model runs its own weights."""
    bound: Any = model.forward
    if isinstance(bound, MethodType) and bound.__self__ is model:
        return bound.__func__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    return wraps(bound)(forward) if isinstance(bound, FunctionType) else forward
