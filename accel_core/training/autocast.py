"""A unit's contexts around a model's forward: autocast and its random stream.

A `forward` in the module's own `__dict__` enters the contexts. The method is bound to this module: a deep
copy of the model (EMA) has its own, and a pickle has the class's.
Forward hooks are not enough: torch runs none when a forward ends by KeyboardInterrupt or another exception
that is not an `Exception`, and autocast would stay on afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from accel_core.distributed.nested import convert_to_fp32
from accel_core.training.names import inside

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.unit import Unit

Factory = Callable[[], AbstractContextManager[Any]]


def attach_contexts(unit: Unit, model: nn.Module) -> None:
    """Enter the unit's contexts around each forward of the model."""
    factory = _with_stream(unit, unit.hooks.autocast(unit))
    if factory is not None:
        run = unit.run
        detach = _attach(model, factory, run.device.type, outputs_to_fp32=run.config.autocast.outputs_to_fp32)
        unit.detach.append(detach)


def _with_stream(unit: Unit, factory: Factory | None) -> Factory | None:
    """Return `factory`, inside the unit's random stream if the unit has one."""
    stream = unit.stream
    if stream is None:
        return factory

    @contextmanager
    def context() -> Iterator[None]:
        with stream.drawn_from(), nullcontext() if factory is None else factory():
            yield

    return context


def _attach(model: nn.Module, factory: Factory, device: str, *, outputs_to_fp32: bool) -> Callable[[], None]:
    """Enter `factory()` around each forward of `model`; return a function that undoes this.

    Args:
        model: the module inside a prepared model.
        factory: makes the context.
        device: torch device type.
        outputs_to_fp32: convert outputs to float32 if autocast is on for `device`.
    """
    before, forward = model.__dict__.get("forward"), _function(model)

    has_autocast = torch.amp.is_autocast_available(device)

    # Compilers skip frames of torch's own code. This frame is ours, so torch's own classes compile too.
    def compilable(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # No compiler can follow a plugin's contexts, so they are entered outside the compiled code.
    converted = torch.compiler.disable(convert_to_fp32)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    @wraps(forward)
    def under_contexts(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with factory():
            output = compilable(self, *args, **kwargs)
            if outputs_to_fp32 and has_autocast and torch.is_autocast_enabled(device):
                output = converted(output)
        return output

    under_contexts.__name__ = "forward"  # by this name a pickle finds the class's method
    under_contexts.before = before
    model.__dict__["forward"] = bound = MethodType(under_contexts, model)

    def detach() -> None:
        if model.__dict__.get("forward") is bound:
            del model.__dict__["forward"]
            if before is not None:
                model.__dict__["forward"] = before

    return detach


def without_contexts(model: nn.Module) -> nn.Module:
    """Return a view of the model that enters no contexts; the model itself if it has none."""
    found = inside(model)
    while hasattr(attached := _attached(found), "before"):
        view, before = copy.copy(found), attached.before  # a copy shares the tables of tensors and modules
        del view.__dict__["forward"]
        if before is not None:
            is_bound = isinstance(before, MethodType) and before.__self__ is found
            view.__dict__["forward"] = MethodType(before.__func__, view) if is_bound else before
        found = view
    return model if found is inside(model) else found


def _attached(model: nn.Module) -> Any:
    """Return the function of the `forward` in the module's own `__dict__`, or None."""
    return getattr(model.__dict__.get("forward"), "__func__", None)


def _function(model: nn.Module) -> Callable[..., Any]:
    """Return the forward as a function that takes the module, so that copies run their own weights."""
    bound: Any = model.forward
    if isinstance(bound, MethodType) and bound.__self__ is model:
        return bound.__func__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    return wraps(bound)(forward) if isinstance(bound, FunctionType) else forward
