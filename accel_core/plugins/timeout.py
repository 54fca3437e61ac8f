"""Calling what may hang: a stranger's code, on machines where a mount is dead or a driver stuck."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, TypeVar

__all__ = ["HungError", "Patience", "surviving"]

PATIENCE: Final = 4.0
"""Seconds that importing a card, or its probe, may take."""

T = TypeVar("T")


class HungError(Exception):
    """A call did not come back in time; `where` it was then."""

    def __init__(self, seconds: float, where: str) -> None:
        super().__init__(f"took longer than {seconds:g} s")
        self.where = where


@contextmanager
def surviving() -> Iterator[None]:
    """While a stranger's code runs, os._exit is an error of its own; a crash says where it was."""

    def leave(status: int) -> NoReturn:
        raise SystemExit(f"os._exit({status}) was called")

    real, os._exit = os._exit, leave
    stderr = sys.__stderr__
    watch = not faulthandler.is_enabled() and stderr is not None and not stderr.closed
    if watch and stderr is not None:
        faulthandler.enable(stderr)
    try:
        yield
    finally:
        os._exit = real
        if watch:
            faulthandler.disable()


class Patience:
    """Calls what may hang, on a daemon thread that does not keep the process from ending.

    Each hang halves what is left for the others: a shelf of dead mounts costs twice one of them.
    """

    def __init__(self) -> None:
        self.seconds = PATIENCE

    def __call__(self, call: Callable[[], T]) -> T:
        answers: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                answers.append(call())
            except BaseException as error:  # handed over to the caller's thread
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        with surviving():
            thread.start()
            thread.join(self.seconds)
        if errors and isinstance(errors[0], KeyboardInterrupt):  # a user's Ctrl-C arrives on the main thread
            raise RuntimeError("raised KeyboardInterrupt by itself") from errors[0]
        if errors:
            raise errors[0]
        if answers:
            return answers[0]
        where = "".join(traceback.format_stack(sys._current_frames().get(thread.ident or 0)))
        error = HungError(self.seconds, where)
        self.seconds /= 2
        raise error
