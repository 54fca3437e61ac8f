"""A hook before each step of any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
