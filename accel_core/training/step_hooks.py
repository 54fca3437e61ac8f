"""Step hooks of an optimizer whose step is computed by other code than `optimizer.step()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.optim import Optimizer

T = TypeVar("T")


def step_with_hooks(optimizer: Optimizer, compute: Callable[[], T]) -> T:
    """Compute a step in place of `optimizer.step()`, and return the result.

    All that a program has attached to the step happens as usual: hooks before and after the step, hooks of
    all optimizers, the profiler's record. Schedulers see that the optimizer has stepped.

    Args:
        optimizer: the optimizer that the program holds, with its hooks and `param_groups`.
        compute: computes the step, without calling `optimizer.step`.
    """
    result = Optimizer.profile_hook_step(lambda *_, **__: compute())(optimizer)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it
    return result
