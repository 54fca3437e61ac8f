"""Hooks before each step of any optimizer, and before each forward of any module."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def before_step(optimizer: Optimizer, hook: Callable[..., Any]) -> Callable[[], None]:
    """Call a hook before each step of the optimizer; return a function that removes the hook.

    Works like `optimizer.register_step_pre_hook`, also for wrappers of optimizers that never call the
    `__init__` of `torch.optim.Optimizer` and therefore lack this method.

    Args:
        optimizer: any optimizer, or a wrapper of one.
        hook: (optimizer, arguments with the optimizer first, keywords) -> None, or new (arguments, keywords).
    """
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer.register_step_pre_hook(hook).remove
    active, step = [hook], optimizer.step

    @wraps(step)
    def stepped(*arguments: Any, **keywords: Any) -> Any:
        for each in active:
            changed = each(optimizer, (optimizer, *arguments), keywords)
            if changed is not None:
                (_, *arguments), keywords = changed
        return step(*arguments, **keywords)

    optimizer.step = stepped  # type: ignore[method-assign]
    return active.clear


def before_forward(module: nn.Module, hook: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Call a hook before each forward of the module and before all other hooks; return a remover.

    If the module is compiled in place, the hook runs outside the compiled code, unlike hooks that are
    registered with the module.
    """
    compiled = module._compiled_call_impl
    if compiled is None:
        return module.register_forward_pre_hook(lambda module, _: hook(module), prepend=True).remove

    active = [hook]

    def called(*arguments: Any, **keywords: Any) -> Any:
        for each in tuple(active):
            each(module)
        return compiled(*arguments, **keywords)

    def end() -> None:
        active.clear()
        if module._compiled_call_impl is called:  # else a later hook wraps this function and calls it
            module._compiled_call_impl = compiled

    module._compiled_call_impl = called
    return end
