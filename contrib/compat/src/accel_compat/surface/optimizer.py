"""What `prepare` returns for optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_compat.refusing import unserved
from accel_core import PreparedOptimizer

from .state import GradientState
from .utils.operations import send_to_device

__all__ = ["AcceleratedOptimizer", "move_to_device"]


class AcceleratedOptimizer(PreparedOptimizer):
    """An optimizer that steps and clears gradients where a window ends.

    One made by hand, or of no prepared model, follows the newest Accelerator's windows.
    """

    optimizer: Any
    unit: Any
    applied: bool
    scaler: Any
    device_placement: bool

    def __init__(self, optimizer: Any, device_placement: bool = True, scaler: Any = None) -> None:
        # Not PreparedOptimizer.__init__: there is no unit (yet).
        self.__dict__.update(optimizer=optimizer, unit=None, applied=True)
        self.scaler, self.device_placement = scaler, device_placement

    @property
    def gradient_state(self) -> GradientState:
        """The process's."""
        return GradientState()

    @property
    def _is_overflow(self) -> bool:
        return not self.applied

    @_is_overflow.setter
    def _is_overflow(self, value: bool) -> None:
        self.applied = not value

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients, where a window ends."""
        if self.unit is not None:
            super().step(closure)
        elif self.gradient_state.sync_gradients and self.scaler is None:
            self.optimizer.step(closure)
        elif self.gradient_state.sync_gradients:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer, closure)
            self.scaler.update()
            self.applied = self.scaler.get_scale() >= before  # it shrinks where gradients overflowed

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless a window still has to apply them."""
        if self.unit is not None:
            super().zero_grad(set_to_none is not False)
        elif self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none is not False)

    def train(self) -> None:
        """Hand it on to optimizers that have modes."""
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()

    def eval(self) -> None:
        """Hand it on to optimizers that have modes."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()


def move_to_device(state: Any, device: Any) -> Any:
    """A state with its tensors on the device."""
    return send_to_device(state, device)


__getattr__ = unserved(__name__)
