"""The window of a unit: the micro-batches of one optimizer step.

Only the methods of `Window` and of its subclasses write a window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@frozen(kw_only=True, eq=False)
class WindowSize:
    """A window as it is known before its first micro-batch.

    size: its micro-batches. divisor: of each micro-batch's loss; a tensor (0-dim) where items were counted.
    items: those of this rank and of all ranks, where losses are sums over items.
    """

    size: int
    divisor: Tensor | float
    items: tuple[Tensor | float, Tensor | float] | None = None


_STATE: Final = ("awaits_backward", "boundary", "divisor", "index", "items", "number", "size")
"""The attributes in a snapshot of a window."""


class Window:
    """The micro-batches of one optimizer step, counted by core alone.

    index: 0-based number of the current micro-batch in the window; -1 before the first.
    size: micro-batches per window, unless the loader ends earlier.
    boundary: whether the current micro-batch is the window's last.
    awaits_backward: whether the micro-batch's gradients may still be to come: it is entered, and neither a
        backward nor clipping nor a step of ours has been called, and it is not left.
    divisor: of each micro-batch's loss: the window's size, or where losses are sums over items that many.
    items: those of this rank and of all ranks, where losses are sums over items.
    number: of the window, counted from 1 for what comes before the first.

    The states of a micro-batch, and what the calls of an optimizer do in each:

        micro-batch         awaits backward  step        zero_grad
        the only one        either           applies     clears
        the first           yes              nothing     clears, unless cleared since the last boundary
        the first           no               nothing     nothing
        one in the middle   either           nothing     nothing
        the last            yes              applies     nothing, if it stands before the forward; without
                                                         a backward or step after it, the next window clears
        the last            no               applies     clears
    """

    __slots__ = (*_STATE, "_next", "deferred_zero_grads")

    def __init__(self, size: int = 1) -> None:
        self.index = -1
        self.size = self._next = size
        self.boundary = True
        self.awaits_backward = True
        self.divisor: Tensor | float = size
        self.items: tuple[Tensor | float, Tensor | float] | None = None
        self.number = 1
        self.deferred_zero_grads: dict[Any, Callable[[], object]] = {}
        """By optimizer: clears as the next window begins, if nothing came first."""

    # -- what is asked ----------------------------------------------------------------------------

    @property
    def is_begun(self) -> bool:
        """True inside a window whose micro-batches may have left gradients."""
        return not self.boundary and (self.index > 0 or not self.awaits_backward)

    def cleared(self, clean_from: int) -> int | None:
        """Return the number of the first window whose gradients a `zero_grad` now would leave alone.

        None where it clears nothing, by the table above. clean_from: what the last one that cleared got here.
        """
        if self.boundary:
            if self.awaits_backward:
                return self.number if self.index <= 0 else None
            return self.number + 1
        clears = self.index == 0 and self.awaits_backward and clean_from < self.number
        return self.number if clears else None

    def part_of(self, loss: Tensor) -> Tensor:
        """Return the micro-batch's part of the window's loss: `loss` by the divisor."""
        divisor = self.divisor
        if isinstance(divisor, float | int):
            return loss if divisor == 1 else loss / divisor
        import torch  # late: this module is imported without it

        return loss / divisor.to(loss.device, torch.promote_types(loss.dtype, torch.float32))

    # -- micro-batch by micro-batch ---------------------------------------------------------------

    def enter(self, last: bool, window_size: WindowSize | None = None) -> None:
        """Begin the next micro-batch: of this window, or after its boundary of a new one.

        window_size: of a new window. Default: the size that is set, and a mean over it.
        """
        if self.boundary:
            if self.deferred_zero_grads:
                self.run_deferred_zero_grads()
            self.size = self.divisor = self._next
            self.items = None
            if window_size is not None:
                self._take(window_size)
            self.index = 0
            self.number += 1
        else:
            self.index += 1
        self.boundary = last or self.index + 1 >= self.size
        self.awaits_backward = True

    def _take(self, window_size: WindowSize) -> None:
        self.size, self.divisor, self.items = window_size.size, window_size.divisor, window_size.items

    def note_backward(self) -> None:
        """Note that later calls come after the backward of the current micro-batch."""
        self.awaits_backward = False
        if self.deferred_zero_grads:
            self.deferred_zero_grads = {}

    def leave(self) -> None:
        """End the current micro-batch, with or without a backward."""
        self.awaits_backward = False

    def defer_zero_grad(self, optimizer: Any, clear: Callable[[], object]) -> None:
        """Put off a `zero_grad` that may stand before the last forward."""
        self.deferred_zero_grads[optimizer] = clear

    def run_deferred_zero_grads(self) -> None:
        """Clear what was put off until the next window."""
        self.awaits_backward = False
        for clear in self.deferred_zero_grads.values():
            clear()
        self.deferred_zero_grads = {}  # last: Ctrl-C may come before

    def mark_last(self, last: bool) -> None:
        """Make the current micro-batch the window's last, or not."""
        self.boundary = last

    # -- as a whole -------------------------------------------------------------------------------

    def begin_whole(self, window_size: WindowSize | None) -> None:
        """Begin a window that is run as a whole."""
        self.index, self.size, self.divisor, self.items = -1, self._next, self._next, None
        self.boundary, self.number = False, self.number + 1
        if window_size is not None:
            self._take(window_size)

    def fill(self, count: int) -> None:
        """Move to the last of `count` micro-batches."""
        if self.items is None:
            self.divisor = count
        self.index, self.size, self.boundary = count - 1, count, True

    def end_whole(self) -> None:
        """End a window that was run as a whole; the next one has the size that is set."""
        self.size = self._next
        self.awaits_backward = False

    # -- set from outside -------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Return to before a window's first micro-batch."""
        self.index, self.size, self.divisor, self.items = -1, self._next, self._next, None
        self.boundary, self.awaits_backward, self.deferred_zero_grads = True, True, {}

    def resize(self, size: int, *, current: bool) -> None:
        """Set the size of windows from the next one on; of the current one too, if asked."""
        self._next = size
        if current:
            self.size = size
            if self.items is None:
                self.divisor = size

    def snapshot(self) -> tuple[Any, ...]:
        """Return the state that `restore` takes."""
        return tuple(getattr(self, name) for name in _STATE)

    def restore(self, state: tuple[Any, ...]) -> None:
        """Return to the state of this snapshot.

        A size for later windows that was set in the meantime stays.
        """
        for name, value in zip(_STATE, state, strict=True):
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"Window(index={self.index}, size={self.size}, boundary={self.boundary})"
