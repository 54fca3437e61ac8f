"""The phase of a unit's gradients, and the contexts that it is in."""

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
    """State of an optimizer's gradients; clean ones have none.

    PARTIAL: a backward of core's has accumulated gradients that their strategy has not reduced.
    OPEN: a backward has accumulated gradients and, for strategies that reduce in backward, reduced them.
    FINISHED: the gradients are reduced and unscaled.
    """

    PARTIAL = "partial"
    OPEN = "open"
    FINISHED = "finished"


@define(eq=False)
class StepState:
    """The state of a unit's gradients: clean, open after a backward, finished, and clean again.

    `backward` opens them, the first of clip, unscale and step finishes them, `step` and `zero_grad` clean
    them. Gradients of a loss's own `backward()` are not noted: each of these calls finishes them.

    has_custom_step: a step is more than torch's, or is checked.
    phases: gradient phase per optimizer; key None if the unit has no optimizer. Optimizers without gradients
        are absent.
    shares_losses: a loss of several units has opened the gradients.
    no_sync_depth: number of entered contexts without reduction.
    uneven: ranks run out of batches at different times.
    """

    has_custom_step: bool
    phases: dict[Optimizer | None, Phase] = field(factory=dict)
    shares_losses: bool = False
    no_sync_depth: int = 0
    uneven: bool = False

    @classmethod
    def of(cls, steps: Steps, mark_step: Callable[..., Any] | None, *, reduces: bool) -> StepState:
        """Return the state of a unit with these hooks, before its first step.

        reduces: ranks reduce gradients, in each backward or at a window's end.
        """
        finishing = (steps.reduce_gradients, steps.unscale, steps.optimizer_step, mark_step)
        in_backward = reduces and steps.no_sync is not None
        return cls(has_custom_step=in_backward or finishing.count(None) < len(finishing))

    @property
    def is_partial(self) -> bool:
        """True while some gradients are not reduced, as after a backward in `no_sync`."""
        return Phase.PARTIAL in self.phases.values()

    def require_custom_step(self) -> None:
        """Have each step do more than torch's."""
        self.has_custom_step = True

    def open(self, optimizers: Sequence[Optimizer], *, partial: bool) -> None:
        """Note a backward of core's. partial: one in which the strategy does not reduce."""
        phase = Phase.PARTIAL if partial else Phase.OPEN
        for each in optimizers or (None,):
            self.phases[each] = phase

    def share(self) -> None:
        """Note that other units share the loss."""
        self.shares_losses = True

    def phases_of(self, optimizer: Optimizer | None) -> set[Phase]:
        """Return the phases of this optimizer's gradients, or of all."""
        if optimizer is None:
            return {*self.phases.values()}
        return {self.phases[optimizer]} if optimizer in self.phases else set()

    def finish(self) -> None:
        """Note that all open gradients are reduced and unscaled now."""
        self.phases = dict.fromkeys(self.phases, Phase.FINISHED)

    def clean_all(self) -> None:
        """Note that there are no gradients any more."""
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
        """Let ranks run out of batches at different times."""
        self.uneven = True
        try:
            yield
        finally:
            self.uneven = False
