"""Gradients of version 1 that a context no_sync has kept from being reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  as everybody calls it

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Unit

__all__ = ["Unreduced"]


class Unreduced:
    """The flat vectors of a unit whose gradients are this rank's alone.

    A backward in no_sync adds a vector, the next one that reduces its gradient removes it. A vector stays
    where no later backward runs its module.
    """

    def __init__(self) -> None:
        self._handles: set[Any] = set()

    def follow(self, model: nn.Module) -> None:
        """Note each reduction of the model's gradients."""
        for module in FSDP.fsdp_modules(model):
            handle: Any = module._handle
            if handle is not None:
                # torch calls it after each reduction, and nowhere else.
                vars(handle)["_reset_is_grad_none"] = partial(
                    self._reduced, handle, handle._reset_is_grad_none
                )

    @contextmanager
    def kept_in(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Note the vectors that get gradients inside, where nothing is reduced."""
        try:
            yield
        finally:
            modules = [part for model in models for part in FSDP.fsdp_modules(model)]
            handles: list[Any] = [module._handle for module in modules if module._handle is not None]
            # torch sets the mark in each backward, and clears it in those that reduce.
            self._handles.update(h for h in handles if getattr(h.flat_param, "_post_backward_called", False))

    def _reduced(self, handle: Any, reset: Callable[[], None]) -> None:
        self._handles.discard(handle)
        reset()

    def refuse(self, unit: Unit, optimizer: Optimizer, *arguments: Any) -> None:
        """Refuse a step by gradients of this rank alone. Raises AccelError."""
        if not self._handles:
            return
        named = unit.named_parameters().items()
        alone = {p for handle in self._handles for p in handle.flat_param._params}
        names = [name for name, p in named if p in alone and p.grad is not None]
        self._handles.clear()
        if names:
            raise AccelError(
                f"unit {unit.name!r}: the last backward through {names[0]} ran inside no_sync, so its"
                f" gradient is not reduced ({len(names)} such parameter(s)); each rank would train a model of"
                " its own\n"
                "run the last backward before a step outside no_sync; in accumulate, let the last micro-batch"
                " go through all of the model"
            )
