"""The window of a unit: the micro-batches of one optimizer step.

Only the methods of `Window` write one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_core.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Window:
    """The micro-batches of one optimizer step, counted by core alone.

    index: 0-based number of the current micro-batch in the window; -1 before the first.
    size: micro-batches per window, unless the loader ends earlier.
    boundary: whether the current micro-batch is the window's last.
    awaits_backward: whether the micro-batch's gradients may still be to come: it is entered, and neither a
        backward nor clipping nor a step of ours has been called, and it is not left.
    items: what this rank's micro-batches hold so far, where losses are sums over items; else None.
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

    __slots__ = (
        *("_left", "_next", "awaits_backward", "boundary", "index", "items", "number", "put_off", "size"),
    )

    def __init__(self, size: int = 1) -> None:
        self.index = -1
        self.size = self._next = size
        self.boundary = True
        self.awaits_backward = True
        self.items: Tensor | float | None = None
        self.number = 1
        self.put_off: dict[Any, Callable[[], object]] = {}
        """By optimizer: clears as the next window begins, if nothing came first."""
        self._left: tuple[int, int] | None = None

    # -- what is asked ----------------------------------------------------------------------------

    @property
    def position(self) -> tuple[int, int]:
        """The window's number, and the index of its current micro-batch."""
        return self.number, self.index

    @property
    def is_begun(self) -> bool:
        """True inside a window whose micro-batches may have left gradients."""
        return not self.boundary and (self.index > 0 or not self.awaits_backward)

    @property
    def is_left(self) -> bool:
        """True once the loop that the current micro-batch was in is over."""
        return self._left == self.position

    @property
    def divisor(self) -> int:
        """Divisor of each micro-batch's loss.

        The number of micro-batches where losses are means, 1 where they are sums.
        """
        return self.size if self.items is None else 1

    def cleared(self, clean_from: int) -> int | None:
        """Return `clean_from` after a `zero_grad` now.

        None where that clears nothing, by the table above.
        clean_from: as of the optimizer's last `zero_grad` that cleared.
        """
        if self.boundary:
            if self.awaits_backward:
                return self.number if self.index <= 0 else None
            return self.number + 1
        clears = self.index == 0 and self.awaits_backward and clean_from < self.number
        return self.number if clears else None

    @property
    def clean_from(self) -> int:
        """Number of the first window whose gradients would survive a clearing now."""
        return self.number + (self.boundary and not self.awaits_backward)

    # -- micro-batch by micro-batch ---------------------------------------------------------------

    def enter(self, last: bool, items: Tensor | float | None) -> None:
        """Begin the next micro-batch: of this window, or after its boundary of a new one.

        Raises AccelError, and changes nothing, where some micro-batches count items and others do not.
        """
        if self.boundary:
            if self.put_off:
                self.clear_put_off()
            index, self.size = 0, self._next
            self.items = None if items is None else items + 0  # a copy: the user may write the next into it
            self.number += 1
        else:
            if items is not None or self.items is not None:
                self._count(items)
            index = self.index + 1
        self.index, self.boundary = index, last or index + 1 >= self.size
        self.awaits_backward = True

    def _count(self, items: Tensor | float | None) -> None:
        if items is None or self.items is None:
            raise AccelError(
                "accumulate was given items= for some micro-batches of a window, and not for others\n"
                "give items= for each (0 where there are none), or for none"
            )
        self.items = self.items + items

    def note_backward(self) -> None:
        """Note that later calls come after the backward of the current micro-batch."""
        self.awaits_backward = False
        if self.put_off:
            self.put_off = {}

    def leave(self) -> None:
        """End the current micro-batch, with or without a backward."""
        self.awaits_backward = False

    def clear_later(self, optimizer: Any, clear: Callable[[], object]) -> None:
        """Put off a `zero_grad` that may stand before the last forward."""
        self.put_off[optimizer] = clear

    def clear_put_off(self) -> None:
        """Clear what was put off until the next window."""
        self.awaits_backward = False
        for clear in self.put_off.values():
            clear()
        self.put_off = {}  # last: Ctrl-C may come before

    def mark_last(self, last: bool) -> None:
        """Make the current micro-batch the window's last, or not."""
        self.boundary = last

    def end_loop(self, position: tuple[int, int]) -> None:
        """Note the end of a loop over a loader.

        position: of the window when the loop began.
        """
        if self.position != position:  # the loop trained
            self._left = self.position

    # -- as a whole -------------------------------------------------------------------------------

    def begin_whole(self, items: Tensor | float | None) -> None:
        """Begin a window that is run as a whole.

        items: of all its micro-batches.
        """
        self.index, self.size, self.boundary = -1, self._next, False
        self.items = None if items is None else items + 0
        self.number += 1

    def fill(self, count: int) -> None:
        """Move to the last of `count` micro-batches."""
        self.index, self.size, self.boundary = count - 1, count, True

    def end_whole(self) -> None:
        """End a window that was run as a whole; the next one has the size that is set."""
        self.size = self._next
        self.awaits_backward = False

    # -- set from outside -------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Return to before a window's first micro-batch."""
        self.index, self.size, self.boundary, self.items = -1, self._next, True, None
        self.awaits_backward, self.put_off = True, {}

    def move_to(self, index: int) -> None:
        """Make the micro-batch `index` the current one.

        -1 is the boundary before a window's first.
        """
        self.index, self.boundary = index, index < 0

    def resize(self, size: int, *, current: bool) -> None:
        """Set the size of windows from the next one on; of the current one too, if asked."""
        self._next = size
        if current:
            self.size = size

    def drop_items(self) -> None:
        """Count no items, as outside of any window."""
        self.items = None

    def snapshot(self) -> tuple[Any, ...]:
        """Return the state that `restore` takes."""
        return self.index, self.size, self.boundary, self.awaits_backward, self.items, self.number

    def restore(self, state: tuple[Any, ...]) -> None:
        """Return to the state of this snapshot.

        A size for later windows that was set in the meantime stays.
        """
        self.index, self.size, self.boundary, self.awaits_backward, self.items, self.number = state

    def __repr__(self) -> str:
        return f"Window(index={self.index}, size={self.size}, boundary={self.boundary})"
