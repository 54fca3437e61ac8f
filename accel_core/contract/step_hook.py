"""Hooks before each step of any optimizer, and before each forward of any module."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def before_step(optimizer: Optimizer, hook: Callable[..., Any]) -> Callable[[], None]:
    """Call a hook before each step of the optimizer.

    The returned function ends it. Like `optimizer.register_step_pre_hook`, which wrappers of optimizers
    lack that never call the `__init__` of `torch.optim.Optimizer`.

    hook: (optimizer, arguments with the optimizer first, keywords) -> None, or both anew.
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
    """Call a hook before each forward of the module, first of all hooks.

    The returned function ends it. Unlike hooks that are registered with a module that is compiled in place,
    it is outside of what is compiled.
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
        if module._compiled_call_impl is called:  # else another hook came later, and calls this one
            module._compiled_call_impl = compiled

    module._compiled_call_impl = called
    return end
