"""`torch.compile` in place.

The model stays the user's object, and its state keeps its names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_core.distributed.logging import get_logger
from accel_core.distributed.progress import show_progress
from accel_core.training.names import inside

if TYPE_CHECKING:
    from accel_core.contract.config import TorchDynamoPlugin
    from accel_core.contract.unit import Unit

_logger = get_logger(__name__)


def compile_model(model: nn.Module, config: TorchDynamoPlugin, usual: str | None) -> list[nn.Module]:
    """Compile the model's forward at its first call; return the modules that were not compiled before.

    With `use_regional_compilation`, the forwards of its repeated blocks are compiled instead. Modules that
    are compiled already stay as they are.

    Args:
        model: compiled in place.
        config: settings of `torch.compile`.
        usual: the backend that `auto` stands for on this device; None: inductor.
    """
    backend = (config.backend or "no").lower()
    if backend == "auto":
        backend = usual or "inductor"
    if backend == "no" or _is_compiled(model):
        return []
    options = config.to_kwargs()
    options.pop("use_regional_compilation", None)
    options.pop("backend", None)
    blocks = list(_repeated(model)) if config.use_regional_compilation else []
    if config.use_regional_compilation and not blocks:
        _logger.warning(
            "use_regional_compilation: %s has no list of blocks of one class; the whole model is compiled",
            type(model).__name__,
        )
    chosen = [module for module in blocks or [model] if not _is_compiled(module)]
    for module in chosen:
        # As nn.Module.compile does, which gives torch's own classes no frame that dynamo would look at.
        call = _framed(module) if type(module).__module__.startswith("torch.") else module._call_impl
        module._compiled_call_impl = _told(module, torch.compile(call, backend=backend, **options))
    return chosen


def _told(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that shows progress in its first call, then puts `compiled` in its place."""

    def first(*args: Any, **kwargs: Any) -> Any:
        # Another library may have wrapped this function, or compile it into a larger graph.
        if torch.compiler.is_compiling() or module._compiled_call_impl is not first:
            return compiled(*args, **kwargs)
        module._compiled_call_impl = compiled
        with show_progress(f"compiling {type(module).__name__}, in its first call"):
            return compiled(*args, **kwargs)

    return first


def records_graphs(config: TorchDynamoPlugin) -> bool:
    """Return True if this config may record CUDA graphs, which are replayed in the same memory."""
    modes, options = ("reduce-overhead", "max-autotune"), config.options or {}
    return config.mode in modes or config.backend == "cudagraphs" or bool(options.get("triton.cudagraphs"))


def comes_with_graphs(model: nn.Module) -> bool:
    """Return True if the user compiled the model, or a part of it, with CUDA graphs."""
    return any(_is_told_to_record(module) for module in model.modules() if _is_compiled(module))


def _is_told_to_record(module: nn.Module) -> bool:
    compiled: Any = module._compiled_call_impl or module
    config = compiled.get_compiler_config() if hasattr(compiled, "get_compiler_config") else None
    return bool(config and config.get("triton.cudagraphs"))


def keep_gradients(units: Iterable[Unit]) -> None:
    """Copy the gradients of units whose windows have further micro-batches."""
    for unit in units:
        if not unit.window.boundary:
            copy_gradients(unit)


def copy_gradients(unit: Unit) -> None:
    """Copy a unit's gradients out of the memory of a CUDA graph.

    A graph's backward leaves gradients in memory that its next replay overwrites: torch raises then, see
    https://github.com/pytorch/pytorch/issues/169545.
    """
    for parameter in (p for model in unit.models for p in model.parameters()):
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def run_eagerly(module: nn.Module) -> None:
    """Undo `compile_model` for a module."""
    module._compiled_call_impl = None


def _framed(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


def uncompiled(model: nn.Module) -> nn.Module:
    """Return an eager view of the model that shares its tensors; the model itself if nothing is compiled."""
    model = inside(model)
    return _eager(model, {}) if any(map(_is_compiled, model.modules())) else model


def _eager(module: nn.Module, views: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in views:
        # A copy is never compiled (nn.Module.__getstate__), and shares the tables of its tensors.
        views[module] = view = copy.copy(inside(module))
        forward = view.__dict__.get("forward")
        if isinstance(forward, MethodType):  # bound to the original module
            view.__dict__["forward"] = MethodType(forward.__func__, view)
        children = {
            name: child if child is None else _eager(child, views) for name, child in view._modules.items()
        }
        view.__dict__["_modules"] = children
    return views[module]


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or inside(module) is not module


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of the outermost lists of one class: equal blocks share compiled code."""
    for child in module.children():
        blocks = list(child) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        if len(blocks) > 1 and len(set(map(type, blocks))) == 1:
            yield from blocks
        else:
            yield from _repeated(child)
