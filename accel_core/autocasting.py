"""How a model's forward comes under the stack's autocast contexts: by hooks on the user's module.

Never by replacing `forward`: that breaks pickling, and a deep copy of the model (EMA) would run
the original's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["attach"]

Factory = Callable[[], AbstractContextManager[Any]]


def attach(model: nn.Module, factory: Factory | None) -> Callable[[], None] | None:
    """Enter `factory()` around each forward of `model`; the result takes it off again."""
    if factory is None:
        return None
    around = _Around(factory)
    handles = (
        model.register_forward_pre_hook(_Enter(around), prepend=True),
        # always_call: an exception in forward must leave autocast too.
        model.register_forward_hook(_Exit(around), always_call=True),
    )

    def detach() -> None:
        for handle in handles:
            handle.remove()

    return detach


class _Around:
    """The contexts entered by forwards that are running. A pickled copy enters none."""

    def __init__(self, factory: Factory | None) -> None:
        self.factory = factory
        self.entered: list[AbstractContextManager[Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Around:
        copied = memo[id(self)] = _Around(self.factory)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _Around, (None,)


class _Enter:
    def __init__(self, around: _Around) -> None:
        self.around = around

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.around.factory is not None:
            context = self.around.factory()
            context.__enter__()
            self.around.entered.append(context)


class _Exit:
    def __init__(self, around: _Around) -> None:
        self.around = around

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.around.entered:
            self.around.entered.pop().__exit__(None, None, None)
