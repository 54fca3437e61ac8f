"""The most that a work waits for stores, whose libraries may wait for longer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, TypeAlias

LOOK_SECONDS: Final = 0.5
"""Between two looks at the time; Ctrl-C is heard then."""
CLEARING_SECONDS: Final = 5.0
"""Seconds for what is still asked of stores after Ctrl-C."""
_Answer: TypeAlias = "tuple[Any, BaseException | None]"
_current: Final[ContextVar[Bound | None]] = ContextVar("bound", default=None)


class NoAnswerError(TimeoutError):
    """A store has not answered in time, or nobody waits for its answer any more."""


class Bound:
    """A work that asks stores, and its end.

    seconds: for which all that it asks is waited for together, as long as other ranks wait for this one;
    unset, until `give_up`. renewed: no other rank waits, so the time begins anew with each answer.
    """

    def __init__(self, seconds: float = math.inf, *, renewed: bool = False) -> None:
        self._seconds, self._renewed = seconds, renewed
        self._deadline = time.monotonic() + seconds
        self.is_given_up = False
        """True once nothing is asked any more. The last request may be done yet."""
        self.was_interrupted = False
        """True once Ctrl-C has ended the wait for a request, which may be done yet."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let this bound what this thread asks, and those that it gives its context."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def give_up(self) -> None:
        """Ask no more, in any thread."""
        self.is_given_up = True

    def ask(self, hook: str, call: Callable[[], Any]) -> Any:
        """Return the answer of a store. Raises NoAnswerError, or what the store raises."""
        if self.is_given_up:
            raise NoAnswerError(f"nothing is asked any more, {hook} neither")
        if self._seconds == math.inf:  # its thread may wait, as another one gives it up
            return call()
        ended: SimpleQueue[_Answer] = SimpleQueue()

        def answer() -> None:
            try:
                ended.put((call(), None))
            except BaseException as error:  # it is raised where it was asked
                ended.put((None, error))

        try:  # Ctrl-C may come between any two instructions
            Thread(target=answer, name=hook, daemon=True).start()
            found, error = self._answer(ended, hook)
        except KeyboardInterrupt:
            self.was_interrupted = True
            self._deadline = min(self._deadline, time.monotonic() + CLEARING_SECONDS)
            raise
        if self._renewed and not self.was_interrupted:
            self._deadline = time.monotonic() + self._seconds
        if error is not None:
            raise error
        return found

    def _answer(self, ended: SimpleQueue[_Answer], hook: str) -> _Answer:
        while True:
            try:
                return ended.get(timeout=min(LOOK_SECONDS, max(0.0, self._deadline - time.monotonic())))
            except Empty:
                if time.monotonic() >= self._deadline:
                    self.give_up()
                    raise NoAnswerError(f"no answer to {hook} within {self._seconds:g} s") from None


class BoundStore:
    """The hooks of a store, which the work's `Bound` holds for."""

    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks

    def __getattr__(self, name: str) -> Any:
        hook, bound = getattr(self._hooks, name), _current.get()
        return hook if bound is None else lambda *given: bound.ask(name, lambda: hook(*given))


def may_be_done_yet() -> bool:
    """Return True if a request of this work, for which nobody waits, may be done yet."""
    bound = _current.get()
    return bound is not None and (bound.is_given_up or bound.was_interrupted)
