"""The results of `prepare` for optimizers and schedulers.

They are thin objects that know their unit's window.
"""

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

    Everything else is the inner optimizer's. Its copies and pickles are those of the inner optimizer.
    """

    clean_from: int
    """Number of the first window of which there may be gradients."""
    steps_done: int
    """Steps that were applied, those before a resume included."""

    def __init__(self, optimizer: Optimizer, unit: Unit) -> None:
        # Not Optimizer.__init__: groups and state live in the inner optimizer.
        self.__dict__.update(optimizer=optimizer, unit=unit, applied=True, clean_from=unit.window.number + 1)
        self.__dict__["steps_done"] = 0

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients, at the boundary of a window."""
        unit = self.unit
        if unit.window.boundary:
            self.__dict__["applied"] = applied = step.step(unit, self.optimizer, closure)
            self.__dict__["steps_done"] += applied
        elif closure is not None and unit.window.size > 1:
            step.check_closure(unit)
        elif unit.window.awaits_backward:
            unit.window.note_backward()  # maybe the loss's own

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a window still has to apply them.

        `Window` has the table. So this may stand before the forward or after the step, with the same effect.
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
        """The inner optimizer's."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, of parameters that its unit has.

        Raises:
            AccelError: the unit lacks one of them, or its strategy takes none. Nothing is added.
        """
        if self.unit.changes is not None:
            self.unit.changes.refuse_group()
        self.optimizer.add_param_group(param_group)
        unit, added = self.unit, self.param_groups[-1]["params"]
        if unit.run.world.size == 1:
            unit.names.update()  # alone it reduces nothing: later ones may join
        if None in (names := [*map(unit.names.of, added)]):
            del self.param_groups[-1]
            raise AccelError(
                f"add_param_group: a parameter for the {type(self.optimizer).__name__} was not in its models"
                " when they were prepared; its gradient would not be reduced\n"
                "put it into a model before prepare, or call accelerator.free_memory() and prepare anew"
            )
        unit.names.trained.update(names)

    def __setattr__(self, name: str, value: Any) -> None:
        # Its own attributes, and methods that are patched (`step`), stay here; others take effect inside.
        own = name in self.__dict__ or hasattr(type(self), name) or "optimizer" not in self.__dict__
        super().__setattr__(name, value) if own else setattr(self.optimizer, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "unit"):  # not set yet: an object being copied
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
        # Not LRScheduler.__init__: it would step the inner optimizer's rate once more.
        self.__dict__.update(scheduler=scheduler, _optimizers=tuple(optimizers))
        self.__dict__.update(_follows=follows, _each=each_micro_batch)
        if each_micro_batch:  # else torch warns that the optimizer has not stepped before the first
            scheduler.optimizer._opt_called = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the inner scheduler, if its optimizer was applied at this boundary."""
        if self._follows:
            for optimizer in self._optimizers:
                if not (optimizer.applied if optimizer.unit.window.boundary else self._each):
                    return
        self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner scheduler's."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner scheduler's."""
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[Any]:
        """Return the inner scheduler's."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[Any]:
        """Return the inner scheduler's."""
        rates: list[Any] = self.scheduler.get_lr()
        return rates

    def __setattr__(self, name: str, value: Any) -> None:
        # The inner one computes rates: what is set here would have no effect.
        setattr(self.scheduler, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "_optimizers", "_follows", "_each"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.scheduler,)


def prepare_scheduler(scheduler: Any, optimizer: PreparedOptimizer) -> PreparedScheduler:
    """Return the proxy of a scheduler, which is added to its unit."""
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
