"""Optimizers and schedulers that `prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from accel_compat import runs
from accel_compat.configs.enums import DistributedType
from accel_compat.state.gradient_state import GradientState
from accel_compat.state.operations import send_to_device
from accel_compat.state.states import AcceleratorState, distributed_type
from accel_core import PreparedOptimizer, PreparedScheduler


class AcceleratedOptimizer(PreparedOptimizer):
    """An optimizer that steps and clears gradients at the end of a window.

    Without a prepared model it follows the newest Accelerator's windows.
    """

    optimizer: Any
    unit: Any
    applied: bool
    scaler: Any
    device_placement: bool

    def __init__(self, optimizer: Any, device_placement: bool = True, scaler: Any = None) -> None:
        # PreparedOptimizer.__init__ needs a unit, which does not exist yet. A run makes its own without this.
        self.__class__ = _by_hand(type(self))  # type: ignore[arg-type]  # mypy takes its __hash__ for its type's
        self.__dict__.update(optimizer=optimizer, unit=None, applied=True)
        self.__dict__.update(scaler=scaler, device_placement=device_placement)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless a window still has to apply them. None: as True."""
        PreparedOptimizer.zero_grad(self, set_to_none is not False)

    @property
    def gradient_state(self) -> GradientState:
        """The state of its run; without a unit, of the run that trains."""
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
        """Add a group to the optimizer, as its own method does."""
        self.optimizer.add_param_group(param_group)


@cache
def _by_hand(kind: type[AcceleratedOptimizer]) -> type[AcceleratedOptimizer]:
    """Return the class of optimizers that a program makes by itself.

    A subclass's own methods come first.
    """
    if kind is AcceleratedOptimizer:
        return _ByHand
    if issubclass(kind, _ByHand):
        return kind
    called = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind, _ByHand), called)


def move_to_device(state: Any, device: Any) -> Any:
    """Return a state with its tensors on the device."""
    return send_to_device(state, device)


_INF = float("inf")


class AcceleratedScheduler(PreparedScheduler):
    """A scheduler that steps with its optimizer, once for each process.

    So a schedule counts batches of the size that the program gave, on however many processes. Under
    `split_batches`, and under DeepSpeed and Megatron, it steps once.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        several = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        super().__init__(scheduler, several, follows=step_with_optimizer)
        self.__dict__.update(
            optimizers=several,
            step_with_optimizer=step_with_optimizer,
            split_batches=split_batches,
            gradient_state=GradientState(),
        )

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step as often as there are processes, if the optimizers were applied."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1  # else torch says that the optimizer came too late
        elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            for _ in range(self._times()):
                # OneCycleLR raises beyond its last step, which a filled-up last round may reach.
                total = _INF if self.split_batches else getattr(self.scheduler, "total_steps", _INF)
                if getattr(self.scheduler, "_step_count", 0) <= total:
                    self.scheduler.step(*args, **kwargs)

    def _times(self) -> int:
        return steps_each_time(self.gradient_state._run() or runs.current(), self.split_batches)


def steps_each_time(run: Any, split_batches: bool) -> int:
    """Return the steps of a scheduler per optimizer step."""
    engines = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
    return 1 if split_batches or distributed_type(run) in engines else int(run.world.size)
