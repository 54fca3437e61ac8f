"""Calls of third-party code with a timeout: a mount may be dead, a driver stuck."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, TypeVar

__all__ = ["CallTimeout", "PluginTimeoutError", "surviving"]

TIMEOUT_SECONDS: Final = 4.0
"""Time that importing a card, or calling its probe, may take."""

T = TypeVar("T")


class PluginTimeoutError(Exception):
    """A call did not return in time; `where` is the stack of its thread then."""

    def __init__(self, seconds: float, where: str) -> None:
        super().__init__(f"took longer than {seconds:g} s")
        self.where = where


@contextmanager
def surviving() -> Iterator[None]:
    """Turn os._exit of third-party code into SystemExit; let a crash print its stack."""

    def leave(status: int) -> NoReturn:
        if os.getpid() != process:  # a child that a fork has made, which is done
            real(status)
        raise SystemExit(f"os._exit({status}) was called")

    process, real, os._exit = os.getpid(), os._exit, leave
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


class CallTimeout:
    """A time limit for calls that may hang.

    Each timeout halves the next one, so that any number of hanging plugins costs at most twice the
    first.
    """

    def __init__(self) -> None:
        self.seconds = TIMEOUT_SECONDS

    def __call__(self, call: Callable[[], T]) -> T:
        """Return the answer of `call`, or raise its exception or PluginTimeoutError."""
        answers: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                answers.append(call())
            except BaseException as error:  # raised again in the caller's thread
                errors.append(error)

        # A daemon thread: a call that hangs does not keep the process from ending.
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
        error = PluginTimeoutError(self.seconds, where)
        self.seconds /= 2
        raise error
