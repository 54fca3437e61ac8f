"""Hooks as they are bound for a stack, and for the steps of a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Hooks(Protocol):
    """The hooks of a stack, each an attribute to call."""

    def implementations(self, hook: str) -> list[Any]:
        """Return the implementations of the hook, bottom layer first."""

    def below_layer(self, layer: int) -> Hooks:
        """Return the same hooks, answered by the layers below `layer`."""

    def step(self, hook: str) -> Callable[..., Any] | None:
        """Return the callable for each step; None where all implementations do nothing."""

    def __getattr__(self, hook: str) -> Any: ...


class Steps(Protocol):
    """The bound per-step hooks of a unit: an attribute per hook, None for no-ops."""

    def __getattr__(self, hook: str) -> Any: ...
