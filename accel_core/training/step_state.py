"""The phase of a unit's gradients, and the contexts that are entered for the unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from attrs import define, field

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.contract.bound import Steps


class Phase(Enum):
    """Phase of an optimizer's gradients. Cleared gradients have no phase."""

    PARTIAL = "partial"
    """`accelerator.backward` has accumulated gradients that the strategy has not reduced."""
    OPEN = "open"
    """A backward has accumulated gradients and, for strategies that reduce in backward, reduced them."""
    FINISHED = "finished"
    """The gradients are reduced and unscaled."""


@define(eq=False)
class StepState:
    """The state of a unit's gradients: clean, open after a backward, finished, and clean again.

    `backward` opens the gradients, the first call of clip, unscale and step finishes them, `step` and
    `zero_grad` clean them. Gradients of a loss's own `backward()` are not recorded: each call of clip,
    unscale and step finishes them.
    """

    has_custom_step: bool
    """True if a step calls hooks besides `optimizer.step()`, or checks that gradients are reduced."""
    phases: dict[Optimizer | None, Phase] = field(factory=dict)
    """Gradient phase per optimizer; key None if the unit has no optimizer. Clean optimizers are absent."""
    shares_losses: bool = False
    """True if a loss of several units has opened the gradients."""
    no_sync_depth: int = 0
    """Number of entered contexts without reduction."""
    uneven: bool = False
    """True if ranks may run out of batches at different times."""

    @classmethod
    def of(cls, steps: Steps, mark_step: Callable[..., Any] | None, *, reduces: bool) -> StepState:
        """Return the state of a unit with these hooks, before its first step.

        Args:
            steps: the unit's bound hooks.
            mark_step: the device's hook of that name, or None.
            reduces: True if ranks reduce gradients, in each backward or at a window's end.
        """
        finishing = (steps.reduce_gradients, steps.unscale, steps.optimizer_step, mark_step)
        in_backward = reduces and steps.no_sync is not None
        return cls(has_custom_step=in_backward or finishing.count(None) < len(finishing))

    @property
    def is_partial(self) -> bool:
        """True while some gradients are not reduced, as after a backward in `no_sync`."""
        return Phase.PARTIAL in self.phases.values()

    def require_custom_step(self) -> None:
        """Set `has_custom_step`."""
        self.has_custom_step = True

    def open(self, optimizers: Sequence[Optimizer], *, partial: bool) -> None:
        """Record a call of `accelerator.backward`. partial: the strategy does not reduce in this backward."""
        phase = Phase.PARTIAL if partial else Phase.OPEN
        for each in optimizers or (None,):
            self.phases[each] = phase

    def share(self) -> None:
        """Record that other units share the loss."""
        self.shares_losses = True

    def phases_of(self, optimizer: Optimizer | None) -> set[Phase]:
        """Return the phases of this optimizer's gradients; None: of all optimizers."""
        if optimizer is None:
            return {*self.phases.values()}
        return {self.phases[optimizer]} if optimizer in self.phases else set()

    def finish(self) -> None:
        """Record that all open gradients are reduced and unscaled."""
        self.phases = dict.fromkeys(self.phases, Phase.FINISHED)

    def clean_all(self) -> None:
        """Record that all gradients are cleared."""
        self.phases.clear()

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Count a context in which gradients are not reduced."""
        self.no_sync_depth += 1
        try:
            yield
        finally:
            self.no_sync_depth -= 1

    @contextmanager
    def uneven_inputs(self) -> Iterator[None]:
        """Allow ranks to run out of batches at different times."""
        self.uneven = True
        try:
            yield
        finally:
            self.uneven = False
