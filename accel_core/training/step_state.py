"""State of a unit's gradients in its current step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.contract.bound import Steps
    from accel_core.contract.unit import Unit
    from accel_core.contract.window import Window

Version = tuple[int, int] | None
"""(id, number of changes in place) of a gradient; None for a missing one."""
Versions = list[Version]
Reduced = tuple[dict["Optimizer | None", "Versions | None"], dict["Optimizer", Versions]]
"""(`StepState.reduced`, versions of the gradients)."""
_MIXED: Final = 0
"""In `StepState.counted_in`: of the gradients some are divided by items."""


@define(eq=False)
class StepState:
    """State of a unit's gradients in its current step. Only its methods write it.

    needs_finish: a step is more than torch's: a plugin reduces, unscales, steps, follows or marks it, or
        gradients are divided by items.
    with_gradients: optimizers with gradients of this unit's own losses, not yet applied or dropped.
    sharing: optimizers of losses that other units share, whose gradients, if any, are not applied or dropped.
    reduced: optimizers with reduced gradients, not yet applied or dropped -> their versions, where a loop
        trains several by the loss's own backward, else None. The key None stands for a unit without any.
    undivided: (window's number, parameter -> version) of gradients as they were before they are divided by
        the window's items; without those that are cleared.
    counted_in: optimizer -> number of the window in which its gradients began, where items are counted;
        without those whose gradients are applied or dropped.
    items: of all ranks, in the window that was reduced last, where items are counted.
    settled: optimizer -> (version of its first gradient, whether it was cleared) after its last step or
        clearing, once items are counted.
    has_scaled: a loss of another unit has left gradients here, by another scale than this unit's.
    no_sync_depth: contexts that are entered in which gradients are not reduced, `accumulate` aside.
    allows_uneven_inputs: ranks may run out of batches now.
    averages_uneven_ranks: inside LocalSGD whose ranks may run out of batches.
    """

    needs_finish: bool
    with_gradients: set[Optimizer] = field(factory=set)
    sharing: set[Optimizer] = field(factory=set)
    reduced: dict[Optimizer | None, Versions | None] = field(factory=dict)
    undivided: tuple[int, dict[Tensor, Version]] | None = None
    counted_in: dict[Optimizer, int] = field(factory=dict)
    items: Tensor | None = None
    settled: dict[Optimizer, tuple[Version, bool]] = field(factory=dict)
    has_scaled: bool = False
    no_sync_depth: int = 0
    allows_uneven_inputs: bool = False
    averages_uneven_ranks: bool = False

    @classmethod
    def of(cls, steps: Steps, mark_step: Callable[..., Any] | None) -> StepState:
        """Return the state of a unit with these hooks, before its first step."""
        finishing = (steps.reduce_gradients, steps.unscale, steps.optimizer_step, steps.after_step, mark_step)
        return cls(needs_finish=any(hook is not None for hook in finishing))

    def has_shared_gradients(self) -> bool:
        """Return True while there are gradients of a loss that other units share."""
        return any(map(_has_gradients, self.sharing))

    def has_own_gradients(self, dropped: Iterable[Optimizer], *, kept: bool) -> bool:
        """Return True while there are gradients of the unit's own losses.

        dropped: optimizers that do not count. kept: the strategy may keep gradients elsewhere, where the
            model's own `zero_grad` is not seen.
        """
        return any(kept or _has_gradients(each) for each in self.with_gradients.difference(dropped))

    def expect_items(self, unit: Unit) -> None:
        """Have steps divide gradients by items, from the unit's current window on."""
        self.needs_finish = True
        window = unit.window
        if window.index <= 0:
            self.begin_window()
        for optimizer in unit.optimizers if window.index <= 0 else ():
            if self._carries(unit, optimizer):
                self.counted_in.setdefault(optimizer, window.number - 1)
            else:
                self.counted_in[optimizer] = window.number

    def count(self, unit: Unit) -> None:
        """Count optimizers that have stepped in the window, for its next backward.

        That backward adds to gradients which are divided already, unless they are cleared.
        """
        for optimizer in unit.optimizers:
            if optimizer not in self.counted_in:
                mixes = self._is_applied(optimizer)
                self.counted_in[optimizer] = _MIXED if mixes else unit.window.number

    def is_settled(self, unit: Unit) -> bool:
        """Tell if no gradients of windows that count items wait for a step."""
        return bool(unit.optimizers) and not self.counted_in

    def forget_items(self, unit: Unit) -> None:
        """Have a step refuse gradients that wait for their division.

        For a loss that counts no items, before its backward. What was cleared is forgotten.
        """
        for optimizer, number in [*self.counted_in.items()]:
            if self._carries(unit, optimizer):
                self.counted_in[optimizer] = min(number, unit.window.number - 1)
            else:
                del self.counted_in[optimizer]

    def _carries(self, unit: Unit, optimizer: Optimizer) -> bool:
        """Tell if the optimizer has gradients before its window's first backward.

        A step does not clear them. Values are read only of gradients that are not as they were left.
        """
        waits = optimizer in self.counted_in or optimizer in self.with_gradients or optimizer in self.sharing
        if not waits and self.items is not None:
            version, is_cleared = self.settled.get(optimizer, (None, True))
            now = _first_version(optimizer)
            if now == version:
                return now is not None and not is_cleared
        # Their strategy may keep gradients elsewhere than in the parameters.
        had = optimizer in self.with_gradients or (optimizer in self.sharing and optimizer in self.counted_in)
        kept = unit.steps.zero_grad is not None and had
        return kept or any(map(is_nonzero, _gradients(optimizer)))

    def note_items(self, items: Tensor) -> Tensor:
        """Keep all ranks' items of the window that is reduced; return them."""
        self.items = items
        return items

    def note_scaled(self) -> None:
        """Note gradients that another unit's loss left, by another scale."""
        self.has_scaled = True

    def begin_window(self) -> None:
        """Forget what was done to the gradients of a window that ended without a step."""
        self.reduced.clear()

    def reduced_gradients(self) -> Reduced:
        """Return the gradients that are reduced, neither applied nor dropped.

        They are for `keep_reduced`.
        """
        versions = {optimizer: _versions_of(optimizer) for optimizer in self.reduced if optimizer is not None}
        return self.reduced.copy(), versions

    def keep_reduced(self, before: Reduced, window: Window) -> None:
        """Count gradients that a backward has left alone as reduced still.

        Its loss is then another unit's.

        Raises:
            AccelError: it has added to gradients that are divided by the window's items.
        """
        reduced, versions = before
        if not any(map(any, versions.values())):  # there were none
            return
        if all(_versions_of(optimizer) == noted for optimizer, noted in versions.items()):
            self.reduced = reduced
        elif window.items is not None:
            self.counted_in |= dict.fromkeys(versions, _MIXED)
            raise _mixed()

    def drop(self, optimizer: Optimizer) -> None:
        """Forget the gradients of an optimizer: they are applied, or about to be cleared."""
        self.with_gradients.discard(optimizer)
        self.sharing.discard(optimizer)
        self.reduced.pop(optimizer, None)
        self.counted_in.pop(optimizer, None)
        if self.items is not None:
            self.settled[optimizer] = _first_version(optimizer), False

    def note_cleared(self, optimizer: Optimizer, window: Window, clean_from: int) -> None:
        """Note that no gradients of windows before `clean_from` are left."""
        if window.items is not None and clean_from == window.number:
            self.counted_in[optimizer] = clean_from  # this window's are to come
        if self.items is not None:
            self.settled[optimizer] = _first_version(optimizer), True
        if self.undivided is not None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.undivided[1].pop(parameter, None)

    def clear(self) -> None:
        """Forget all gradients: there are none any more."""
        self.begin_window()
        self.with_gradients.clear()
        self.sharing.clear()
        self.counted_in.clear()
        self.settled.clear()
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

    @contextmanager
    def uneven_averages(self) -> Iterator[None]:
        """Let ranks step alone that run out of batches at different times."""
        self.averages_uneven_ranks = True
        try:
            yield
        finally:
            self.averages_uneven_ranks = False

    # -- gradients that were reduced --------------------------------------------------------------

    def is_reduced(self, optimizer: Optimizer | None, window: Window) -> bool:
        """Return whether the optimizer's gradients are those that were reduced.

        None stands for all optimizers.

        Raises:
            AccelError: gradients of a window with items were replaced by others.
        """
        asked = [*self.reduced] if optimizer is None else [optimizer]
        return bool(asked) and all(key in self.reduced and self._stays_reduced(key, window) for key in asked)

    def _stays_reduced(self, optimizer: Optimizer | None, window: Window) -> bool:
        noted = self.reduced[optimizer]
        if noted is None or optimizer is None:
            return True
        now = _versions_of(optimizer)
        if noted == now or window.items is None:
            return noted == now
        # A window that counts items begins with nothing reduced: these are not of the next one.
        there = [(was, each) for was, each in zip(noted, now, strict=True) if each is not None]
        if all(was is not None and was[0] == each[0] and was[1] <= each[1] for was, each in there):
            return True  # edited in place, or dropped
        if any(was is not None for was, _ in there):
            raise AccelError(
                "accumulate(items=...): gradients that clipping, unscaling or a step had divided by the"
                " window's items were replaced, and nothing tells whether these are divided\n"
                "edit gradients in place, and call accelerator.backward(loss) for each loss"
            )
        return False

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
        """Note the gradients that a backward at the boundary left, still to be divided."""
        self.undivided = window.number, {parameter: _version(parameter.grad) for parameter in parameters}

    def refuse_carried(self, window: Window) -> None:
        """Refuse to divide an earlier window's gradients by the items of this one."""
        if _MIXED in self.counted_in.values():
            raise _mixed()
        if any(number != window.number for number in self.counted_in.values()):
            raise AccelError(
                "accumulate(items=...): gradients of an earlier window were not cleared, and the items of"
                " this window do not count them\n"
                "call optimizer.zero_grad() where a window ends, after the step if it is to be applied, also"
                " where accelerator.sync_gradients = True ends it"
            )

    def refuse_edited(
        self, window: Window, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None
    ) -> None:
        """Refuse a gradient that was changed, or divided, before it is divided by items.

        A step leaves it divided. optimizer: of the step; None stands for all optimizers.
        """
        number, noted = self.undivided or (0, {})
        noted = noted if number == window.number else {}
        edited = [name for name, p in parameters.items() if _is_edited(p, noted)] if noted else []
        is_done = not self.counted_in or (optimizer is not None and optimizer not in self.counted_in)
        asked = [*self.settled] if optimizer is None else [optimizer]
        if (edited and is_done) or any(map(self._is_applied, asked)):
            raise AccelError(
                f"accumulate(items=...): the gradient of {edited[0] if edited else next(iter(parameters))}"
                " was divided by the items of the window and applied, and would be divided again\n"
                "call optimizer.step() once after backward, and clip or unscale before it"
            )
        if edited:
            raise AccelError(
                f"accumulate(items=...): the gradient of {edited[0]} was changed after backward, where"
                " gradients are still sums, yet to be divided by the items of the window\n"
                "call accelerator.unscale_gradients() before changing them: it divides; or clip_grad_norm_ of"
                " the accelerator, to clip"
            )

    def _is_applied(self, optimizer: Optimizer) -> bool:
        """Tell if the gradients are those that the optimizer has applied."""
        version, is_cleared = self.settled.get(optimizer, (None, True))
        if optimizer in self.counted_in or is_cleared or version != _first_version(optimizer):
            return False
        return any(map(is_nonzero, _gradients(optimizer)))


def _mixed() -> AccelError:
    return AccelError(
        "accumulate(items=...): this backward added to gradients that clipping, unscaling or a step"
        " had divided by the window's items\n"
        "call backward for each loss of a model before you clip, unscale or step;"
        " optimizer.zero_grad() drops what is mixed now"
    )


def _is_edited(parameter: nn.Parameter, noted: Mapping[Tensor, Version]) -> bool:
    """Tell if a gradient is there, and another than was noted."""
    now = _version(parameter.grad)
    return now is not None and parameter in noted and noted[parameter] != now


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(True for _ in _gradients(optimizer))


def is_nonzero(gradient: Tensor) -> bool:
    """Tell if any element is not 0, of a DTensor on this rank. Waits for the device."""
    part = getattr(gradient, "_local_tensor", gradient)  # of a DTensor: without a collective
    return bool((part.coalesce().values() if part.is_sparse else part).any())


def _first_version(optimizer: Optimizer) -> Version:
    return _version(next(_gradients(optimizer), None))


def _versions_of(optimizer: Optimizer) -> Versions:
    return _versions(parameter for group in optimizer.param_groups for parameter in group["params"])


def _versions(parameters: Iterable[nn.Parameter]) -> Versions:
    return [_version(parameter.grad) for parameter in parameters]


def _version(gradient: Tensor | None) -> Version:
    if gradient is None:
        return None
    # A change of a DTensor leaves the count of this rank's part alone; strategies add to the part.
    part = getattr(gradient, "_local_tensor", None)
    if part is not None:
        return id(part), gradient._version + part._version
    # A forward may give views of the same gradients anew, and leaves what they are views of.
    base = gradient._base
    return id(gradient if base is None else base), gradient._version
