"""Hooks around a module's forward.

`_hf_hook` of a module holds its hook, `_old_forward` the forward that the hook replaces.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import nn

from accel_compat.packages import load

MOVING_METHODS: Final = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
"""Methods that `dispatch_model` replaces on the model by functions that warn."""


class ModelHook:
    """Callbacks before and after a module's forward.

    The callbacks get its keyword arguments too.

    no_grad: whether the forward runs under torch.no_grad.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Act when the hook is attached, and return the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Act before the forward, and return its arguments."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Act after the forward, and return its output."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Act when the hook is detached, and return the module."""
        return module


def outside_graphs(function: Any) -> Any:
    """Keep torch.compile out of a function; dynamo is imported at its first call."""
    disabled: list[Any] = []

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return called


class SequentialHook(ModelHook):
    """Several hooks, called one after the other at each event."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Attach each hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @outside_graphs
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hand the arguments through each hook."""
        arguments: tuple[Any, Any] = (args, kwargs)
        for hook in self.hooks:
            arguments = hook.pre_forward(module, *arguments[0], **arguments[1])
        return arguments

    @outside_graphs
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Hand the output through each hook."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detach each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module's own forward between its hook's callbacks."""
    args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
    if module._hf_hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return module._hf_hook.post_forward(module, output)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach a hook, in place of the module's own, or after it with `append`."""
    hooked: Any = module
    before = getattr(module, "_hf_hook", None) if append else None
    is_hooked = hasattr(module, "_hf_hook") and hasattr(module, "_old_forward")
    old = hooked._old_forward if is_hooked else module.forward
    hooked._old_forward = old
    hooked = hook.init_hook(module)
    hooked._hf_hook = hook if before is None else SequentialHook(before, hook)
    # A partial of a public function: the hooked module can be pickled and copied.
    _set_forward(module, functools.update_wrapper(functools.partial(_hooked_forward, module), old))
    return hooked  # type: ignore[no-any-return]


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Detach a module's hook, and give the module its own forward back.

    A model that `dispatch_model` dispatched has all its weights afterwards.

    recurse: detach the children's hooks too.
    """
    hooked: Any = module
    if hasattr(module, "_hf_hook"):
        hooked._hf_hook.detach_hook(module)
        del hooked._hf_hook
    if hasattr(module, "_old_forward"):
        _set_forward(module, hooked._old_forward)
        del hooked._old_forward
    for name in MOVING_METHODS:
        vars(module).pop(name, None)
    if vars(module).pop("_dispatched", False):
        load("accel_big_models:undo", "remove_hook_from_module")(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Detach the hooks of a module and of all modules in it."""
    remove_hook_from_module(module, recurse=True)


def _set_forward(module: Any, forward: Any) -> None:
    """Replace the forward of the module.

    Where torch.fx made a class for this module alone, that of the class is replaced.
    """
    target = module.__class__ if "GraphModuleImpl" in str(type(module)) else module
    target.forward = forward
