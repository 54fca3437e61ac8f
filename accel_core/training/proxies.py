"""The proxies that `prepare` returns for optimizers and schedulers: each knows its unit's window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_core.errors import AccelError
from accel_core.training import step

if TYPE_CHECKING:
    from accel_core.contract.unit import Unit


class PreparedOptimizer(Optimizer):
    """An optimizer whose `step` and `zero_grad` do nothing inside a window.

    All other attributes are the inner optimizer's. Copies and pickles of the proxy are copies and pickles of
    the inner optimizer.
    """

    clean_from: int
    """Number of the first window whose gradients `zero_grad` may not have cleared yet."""
    steps_done: int
    """Number of applied steps, including steps before a resume."""

    def __init__(self, optimizer: Optimizer, unit: Unit) -> None:
        # Not Optimizer.__init__: groups and state live in the inner optimizer.
        self.__dict__.update(optimizer=optimizer, unit=unit, applied=True, clean_from=unit.window.number + 1)
        self.__dict__["steps_done"] = 0

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients at the boundary of a window; do nothing inside it."""
        unit = self.unit
        if unit.window.boundary:
            self.__dict__["applied"] = applied = step.step(unit, self.optimizer, closure)
            self.__dict__["steps_done"] += applied
        elif closure is not None and unit.window.size > 1:
            step.check_closure(unit)
        elif unit.window.awaits_backward:
            unit.window.note_backward()  # the loss's own `backward()` may have come before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a window still has to apply them.

        A call before the forward and a call after the step have the same effect; see the table of `Window`.
        """
        unit, optimizer = self.unit, self.optimizer
        clean_from = unit.window.cleared(self.clean_from)
        if clean_from is None:
            if unit.window.boundary:
                unit.window.defer_zero_grad(optimizer, partial(self.zero_grad, set_to_none))
            return
        clear = unit.steps.zero_grad
        optimizer.zero_grad(set_to_none) if clear is None else clear(unit, optimizer, set_to_none)
        unit.step_state.phases.pop(optimizer, None)
        self.__dict__["clean_from"] = clean_from

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step at a boundary was skipped (overflow under a loss scale)."""
        return not self.applied

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the unit's parameters to the inner optimizer.

        Raises:
            AccelError: the unit lacks a parameter, or its strategy takes no further groups. Nothing is added.
        """
        if self.unit.changes is not None:
            self.unit.changes.refuse_group()
        self.optimizer.add_param_group(param_group)
        unit, added = self.unit, self.param_groups[-1]["params"]
        if unit.run.world.size == 1:
            unit.names.update()  # a single rank reduces nothing: parameters added after `prepare` may join
        if None in (names := [*map(unit.names.of, added)]):
            del self.param_groups[-1]
            raise AccelError(
                f"add_param_group: a parameter for the {type(self.optimizer).__name__} was not in its models"
                " when they were prepared; its gradient would not be reduced\n"
                "put it into a model before prepare, or call accelerator.free_memory() and prepare anew"
            )
        unit.names.trained.update(names)

    def __setattr__(self, name: str, value: Any) -> None:
        # The proxy's own attributes and patched methods (`step`) stay here; others go to the inner optimizer.
        own = name in self.__dict__ or hasattr(type(self), name) or "optimizer" not in self.__dict__
        super().__setattr__(name, value) if own else setattr(self.optimizer, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "unit"):  # an object that is being copied has no attributes yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"Prepared{self.optimizer!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.optimizer,)


class PreparedScheduler(LRScheduler):
    """A learning-rate scheduler that steps once per applied optimizer step.

    Inside a window, and after a skipped step, `step` does nothing. With `adjust_scheduler=False` it steps in
    each micro-batch; with `step_scheduler_with_optimizer=False` the user decides.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        *,
        follows: bool,
        each_micro_batch: bool = False,
    ) -> None:
        # Not LRScheduler.__init__: its initial step would change the learning rate once more.
        self.__dict__.update(scheduler=scheduler, _optimizers=tuple(optimizers))
        self.__dict__.update(_follows=follows, _each=each_micro_batch)
        if each_micro_batch:  # torch would warn that the scheduler steps before the optimizer
            scheduler.optimizer._opt_called = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the inner scheduler, if its optimizer was applied at this boundary."""
        if self._follows:
            for optimizer in self._optimizers:
                if not (optimizer.applied if optimizer.unit.window.boundary else self._each):
                    return
        self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner scheduler's state dict."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[Any]:
        """Return the inner scheduler's last learning rates."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[Any]:
        """Return the learning rates that the inner scheduler computes."""
        rates: list[Any] = self.scheduler.get_lr()
        return rates

    def __setattr__(self, name: str, value: Any) -> None:
        # The inner scheduler computes the rates: attributes set on the proxy would have no effect.
        setattr(self.scheduler, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "_optimizers", "_follows", "_each"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.scheduler,)


def prepare_scheduler(scheduler: Any, optimizer: PreparedOptimizer) -> PreparedScheduler:
    """Add a scheduler to its optimizer's unit; return its proxy."""
    unit = optimizer.unit
    if not any(scheduler is other for other in unit.schedulers):
        unit.schedulers.append(scheduler)
    return PreparedScheduler(
        scheduler,
        [optimizer],
        follows=unit.run.config.step_scheduler_with_optimizer,
        each_micro_batch=not unit.run.config.accumulation.adjust_scheduler,
    )


def _same(value: Any) -> Any:
    return value
