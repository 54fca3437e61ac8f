"""State of a unit's gradients in its current step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import define, field

from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.bound import Steps
    from accel_core.contract.window import Window

__all__ = ["StepState"]

Versions = list[tuple[int, int] | None]
"""(id, number of changes in place) of each gradient; None where a parameter has none."""


@define(eq=False)
class StepState:
    """State of a unit's gradients in its current step. Only its methods write it.

    needs_finish: a step is more than torch's: a plugin reduces, unscales, steps, follows or marks it, or
        gradients are divided by items.
    with_gradients: optimizers with gradients of this unit's own losses, not yet applied or dropped.
    reduced: optimizers with reduced gradients, not yet applied or dropped -> their versions, where a loop
        trains several by the loss's own backward, else None. The key None stands for a unit without any.
    unscaled: optimizers that were unscaled in this window.
    undivided: (window's number, versions) of gradients that are still to be divided by the window's items.
    no_sync_depth: contexts that are entered in which gradients are not reduced, `accumulate` aside.
    allows_uneven_inputs: ranks may run out of batches now.
    """

    needs_finish: bool
    with_gradients: set[Optimizer] = field(factory=set)
    reduced: dict[Optimizer | None, Versions | None] = field(factory=dict)
    unscaled: set[Optimizer] = field(factory=set)
    undivided: tuple[int, Versions] | None = None
    no_sync_depth: int = 0
    allows_uneven_inputs: bool = False

    @classmethod
    def of(cls, steps: Steps, mark_step: Callable[..., Any] | None) -> StepState:
        """Return the state of a unit with these hooks, before its first step."""
        finishing = (steps.reduce_gradients, steps.unscale, steps.optimizer_step, steps.after_step, mark_step)
        return cls(needs_finish=any(hook is not None for hook in finishing))

    def expect_items(self) -> None:
        """Have steps divide gradients by items from now on."""
        self.needs_finish = True

    def begin_window(self) -> None:
        """Forget what was done to the gradients of a window that ended without a step."""
        self.reduced.clear()
        self.unscaled.clear()

    def drop(self, optimizer: Optimizer) -> None:
        """Forget the gradients of an optimizer: they are applied, or cleared."""
        self.with_gradients.discard(optimizer)
        self.reduced.pop(optimizer, None)

    def clear(self) -> None:
        """Forget all gradients: there are none any more."""
        self.begin_window()
        self.with_gradients.clear()
        self.undivided = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Count a context in which gradients are not reduced."""
        self.no_sync_depth += 1
        try:
            yield
        finally:
            self.no_sync_depth -= 1

    @contextmanager
    def uneven_inputs(self) -> Iterator[None]:
        """Let ranks run out of batches at different times."""
        self.allows_uneven_inputs = True
        try:
            yield
        finally:
            self.allows_uneven_inputs = False

    # -- gradients that were reduced --------------------------------------------------------------

    def is_reduced(self, optimizer: Optimizer | None) -> bool:
        """Return whether the gradients of the optimizer (None: of all) are those that were reduced."""
        asked = [*self.reduced] if optimizer is None else [optimizer]
        return bool(asked) and all(
            key in self.reduced and self.reduced[key] in (None, key and _versions_of(key)) for key in asked
        )

    def note_reduced(self, optimizers: Iterable[Optimizer]) -> None:
        """Count the gradients of these optimizers as reduced."""
        chosen = list(optimizers)
        by_hand = len(chosen) > 1 and not self.with_gradients
        self.reduced = {key: _versions_of(key) if by_hand else None for key in chosen} or {None: None}

    def note_edited(self) -> None:
        """Count gradients that core itself changed after reduction as reduced."""
        for optimizer, versions in self.reduced.items():
            if versions is not None and optimizer is not None:
                self.reduced[optimizer] = _versions_of(optimizer)

    # -- gradients that are still sums over items -------------------------------------------------

    def note_undivided(self, window: Window, parameters: Iterable[nn.Parameter]) -> None:
        """Note the gradients of a window that counts items, as a backward at the boundary left them."""
        self.undivided = window.number, _versions(parameters)

    def refuse_edited(self, window: Window, parameters: Mapping[str, nn.Parameter]) -> None:
        """Refuse a gradient that was changed before it was divided by items."""
        noted, self.undivided = self.undivided, None
        if noted is None or noted[0] != window.number:
            return
        now = zip(parameters, _versions(parameters.values()), noted[1], strict=True)
        edited = [name for name, version, before in now if version != before]
        if edited:
            raise AccelError(
                f"accumulate(items=...): the gradient of {edited[0]} was changed after backward, where"
                " gradients are still sums, yet to be divided by the items of the window\n"
                "call accelerator.unscale_gradients() before changing them: it divides; or clip_grad_norm_ of"
                " the accelerator, to clip"
            )


def _versions_of(optimizer: Optimizer) -> Versions:
    return _versions(parameter for group in optimizer.param_groups for parameter in group["params"])


def _versions(parameters: Iterable[nn.Parameter]) -> Versions:
    gradients = [parameter.grad for parameter in parameters]
    return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]
