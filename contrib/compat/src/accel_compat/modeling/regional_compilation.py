"""Compiling the repeated blocks of a model one by one."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn


def is_wrapped(module: Any) -> bool:
    """Tell whether `torch.compile` wrapped it."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def is_compiled_module(module: nn.Module) -> bool:
    """Tell whether `torch.compile` wrapped it, or `prepare` compiled it in place."""
    return is_wrapped(module) or getattr(module, "_compiled_call_impl", None) is not None


def is_repeated_blocks(module: nn.Module) -> bool:
    """Tell whether it is a list of equal blocks."""
    return isinstance(module, nn.ModuleList) and all(isinstance(part, type(module[0])) for part in module)


def has_repeated_blocks(module: nn.Module) -> bool:
    """Tell whether there is a list of equal blocks in it."""
    return any(is_repeated_blocks(part) for part in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a twin that shares the weights, each block and each other part compiled.

    The module stays as it is. `_orig_mod` of the twin is the module.
    """
    twin = _twin(module, compile_kwargs)
    twin.__dict__.setdefault("_orig_mod", module)
    return twin


def _twin(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    compiled: Any = partial(torch.compile, **options)
    if is_repeated_blocks(module):
        return nn.ModuleList(map(compiled, module.children()))
    if not has_repeated_blocks(module):
        return compiled(module)  # type: ignore[no-any-return]
    made = object.__new__(type(module))
    vars(made).update(vars(module))
    for name, value in vars(module).items():
        if getattr(value, "__self__", None) is module and hasattr(value, "__func__"):
            vars(made)[name] = MethodType(value.__func__, made)
    made._modules = {name: _twin(child, options) for name, child in module.named_children()}
    return made
