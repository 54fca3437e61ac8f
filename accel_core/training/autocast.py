"""The stack's autocast contexts around a model's forward.

A method `forward` of the module itself enters them. The method is bound to this one module: a deep copy of
the model (EMA) has its own, a pickle has the class's.
Forward hooks are not enough: torch runs none when a forward ends by KeyboardInterrupt or another exception
that is not an `Exception`, and autocast would stay on afterwards.
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
    """Enter `factory()` around each forward of `model`; return a function to undo it.

    outputs_to_fp32: a device type; outputs under its autocast are converted to float32. None: no outputs are.
    """
    if factory is None:
        return None
    before, forward = model.__dict__.get("forward"), _function(model)

    # Compilers skip frames of torch's own code: this one is ours, whatever class the model is of.
    def compilable(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # No compiler can follow a plugin's contexts: they are entered around the code that is compiled.
    converted = torch.compiler.disable(convert_to_fp32)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    @wraps(forward)
    def under_contexts(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with factory():
            output = compilable(self, *args, **kwargs)
            if outputs_to_fp32 is not None and torch.is_autocast_enabled(outputs_to_fp32):
                output = converted(output)
        return output

    under_contexts.__name__ = "forward"  # by this name a pickle finds the class's method
    model.__dict__["forward"] = bound = MethodType(under_contexts, model)

    def detach() -> None:
        if model.__dict__.get("forward") is bound:
            del model.__dict__["forward"]
            if before is not None:
                model.__dict__["forward"] = before

    return detach


def _function(model: nn.Module) -> Callable[..., Any]:
    """Return the forward as a function of the module: copies run their own weights."""
    bound: Any = model.forward
    if isinstance(bound, MethodType) and bound.__self__ is model:
        return bound.__func__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    return wraps(bound)(forward) if isinstance(bound, FunctionType) else forward
