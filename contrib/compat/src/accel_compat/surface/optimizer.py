"""What `prepare` returns for optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from accel_compat.refusing import unserved
from accel_core import PreparedOptimizer

from .state import AcceleratorState, GradientState
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
        # Not PreparedOptimizer.__init__: there is no unit (yet). A run's own are made without this.
        self.__class__ = _by_hand(type(self))  # type: ignore[arg-type]  # mypy takes its __hash__ for its type's
        self.__dict__.update(optimizer=optimizer, unit=None, applied=True)
        self.__dict__.update(scaler=scaler, device_placement=device_placement)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless a window still has to apply them. None: as True."""
        super().zero_grad(set_to_none is not False)

    @property
    def gradient_state(self) -> GradientState:
        """Its run's; of one made by hand, the one that trains."""
        run = self.__dict__.get("run") if self.unit is None else self.unit.run
        return GradientState() if run is None else GradientState.of(run)

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The process's."""
        return AcceleratorState()

    @property
    def _is_overflow(self) -> bool:
        return not self.applied

    @_is_overflow.setter
    def _is_overflow(self, value: bool) -> None:
        self.applied = not value

    def train(self) -> None:
        """Hand it on to optimizers that have modes."""
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()

    def eval(self) -> None:
        """Hand it on to optimizers that have modes."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()


class _ByHand(AcceleratedOptimizer):
    """One without a unit; it becomes the other when its model is prepared."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients, where a window ends."""
        if not self.gradient_state.sync_gradients:
            return
        if self.scaler is None:
            self.optimizer.step(closure)
            return
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self.applied = self.scaler.get_scale() >= before  # it shrinks where gradients overflowed

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless a window still has to apply them."""
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none is not False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's."""
        self.optimizer.add_param_group(param_group)


@cache
def _by_hand(kind: type[AcceleratedOptimizer]) -> type[AcceleratedOptimizer]:
    """The class for what a program makes, of this one or of its own subclass, whose methods come first."""
    if kind is AcceleratedOptimizer:
        return _ByHand
    if issubclass(kind, _ByHand):
        return kind
    called = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind, _ByHand), called)


def move_to_device(state: Any, device: Any) -> Any:
    """A state with its tensors on the device."""
    return send_to_device(state, device)


__getattr__ = unserved(__name__)
