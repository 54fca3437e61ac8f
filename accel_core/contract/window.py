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
    """The size of a window, known before its first micro-batch."""

    size: int
    """Number of micro-batches."""
    divisor: Tensor | float
    """Divides each micro-batch's loss; a 0-dim tensor if items were counted on a device."""
    items: tuple[Tensor | float, Tensor | float] | None = None
    """(items of this rank, items of all ranks) if losses are sums over items."""


_STATE: Final = ("awaits_backward", "boundary", "divisor", "index", "items", "number", "size")
"""The attributes in a snapshot of a window."""


class Window:
    """The micro-batches of one optimizer step, counted by core alone.

    Attributes:
        index: 0-based number of the current micro-batch in the window; -1 before the first.
        size: micro-batches per window, unless the loader ends earlier.
        boundary: whether the current micro-batch is the window's last.
        awaits_backward: whether the current micro-batch may still get its gradients: the program is inside
            the micro-batch and has called neither backward nor clip nor step of a prepared object.
        divisor: divides each micro-batch's loss: the window's size; if losses are sums over items, the items
            of all ranks divided by the number of ranks that compute losses.
        items: (items of this rank, items of all ranks) if losses are sums over items.
        number: number of the window: 1 before the first window, then 2, 3 and so on.

    The effect of an optimizer's calls in each state of a micro-batch:

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
        """Optimizer -> function that clears its gradients as the next window begins, if no backward comes."""

    # -- queries ----------------------------------------------------------------------------------

    @property
    def is_begun(self) -> bool:
        """True inside a window whose micro-batches may have left gradients."""
        return not self.boundary and (self.index > 0 or not self.awaits_backward)

    def cleared(self, clean_from: int) -> int | None:
        """Return the number of the first window whose gradients a `zero_grad` now would not clear.

        Return None if this `zero_grad` clears nothing, by the table above.

        Args:
            clean_from: the result for the optimizer's last `zero_grad` that cleared gradients.
        """
        if self.boundary:
            if self.awaits_backward:
                return self.number if self.index <= 0 else None
            return self.number + 1
        clears = self.index == 0 and self.awaits_backward and clean_from < self.number
        return self.number if clears else None

    def part_of(self, loss: Tensor) -> Tensor:
        """Return the micro-batch's part of the window's loss: `loss` divided by `divisor`."""
        divisor = self.divisor
        if isinstance(divisor, float | int):
            return loss if divisor == 1 else loss / divisor
        import torch  # late: this module is imported without it

        return loss / divisor.to(loss.device, torch.promote_types(loss.dtype, torch.float32))

    # -- micro-batch by micro-batch ---------------------------------------------------------------

    def enter(self, last: bool, window_size: WindowSize | None = None) -> None:
        """Begin the next micro-batch of this window, or after its boundary the first of a new window.

        Args:
            last: the loader ends with this micro-batch, and the window with it.
            window_size: size of a new window. Default: the configured size, and a mean over its losses.
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
        """Record that the backward of the current micro-batch has come."""
        self.awaits_backward = False
        if self.deferred_zero_grads:
            self.deferred_zero_grads = {}

    def leave(self) -> None:
        """End the current micro-batch, with or without a backward."""
        self.awaits_backward = False

    def defer_zero_grad(self, optimizer: Any, clear: Callable[[], object]) -> None:
        """Defer a `zero_grad` that may stand before the last forward."""
        self.deferred_zero_grads[optimizer] = clear

    def run_deferred_zero_grads(self) -> None:
        """Run the deferred calls of `zero_grad`."""
        self.awaits_backward = False
        for clear in self.deferred_zero_grads.values():
            clear()
        self.deferred_zero_grads = {}  # last: after Ctrl-C in the loop, all calls can run again

    def mark_last(self, last: bool) -> None:
        """Make the current micro-batch the window's last, or not."""
        self.boundary = last

    # -- windows run as a whole -------------------------------------------------------------------

    def begin_whole(self, window_size: WindowSize | None) -> None:
        """Begin a window that a strategy runs as a whole."""
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
        """End a window that was run as a whole; the next window has the configured size."""
        self.size = self._next
        self.awaits_backward = False

    # -- changes from outside ---------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Return to before a window's first micro-batch."""
        self.index, self.size, self.divisor, self.items = -1, self._next, self._next, None
        self.boundary, self.awaits_backward, self.deferred_zero_grads = True, True, {}

    def resize(self, size: int, *, current: bool) -> None:
        """Set the size of all later windows; with `current`, of the current window too."""
        self._next = size
        if current:
            self.size = size
            if self.items is None:
                self.divisor = size

    def snapshot(self) -> tuple[Any, ...]:
        """Return the window's state, for `restore`."""
        return tuple(getattr(self, name) for name in _STATE)

    def restore(self, state: tuple[Any, ...]) -> None:
        """Return to the state of a snapshot; a size set for later windows since then stays."""
        for name, value in zip(_STATE, state, strict=True):
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"Window(index={self.index}, size={self.size}, boundary={self.boundary})"
