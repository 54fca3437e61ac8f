"""Calls of third-party code with a timeout: a mount may be dead, a driver stuck."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Final, NoReturn, TypeAlias, TypeVar

TIMEOUT_SECONDS: Final = 4.0
"""Time that importing a card, or calling its probe, may take."""

T = TypeVar("T")
Outcome: TypeAlias = tuple[list[T], BaseException | None]
"""([the answer], None) or ([], what was raised)."""


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

    def each(self, calls: Sequence[Callable[[], T]]) -> list[Outcome[T]]:
        """Return the outcomes of calls that one thread makes, one after the other.

        Each has the time to itself. A call that hangs keeps its thread, and the calls after it are made in
        another.
        """
        outcomes: list[Outcome[T]] = []
        with surviving():
            while len(outcomes) < len(calls):
                outcomes += self._until_one_hangs(calls[len(outcomes) :])
        return outcomes

    def _until_one_hangs(self, calls: Sequence[Callable[[], T]]) -> list[Outcome[T]]:
        ended: SimpleQueue[Outcome[T]] = SimpleQueue()
        waiting = threading.Event()
        waiting.set()

        def work() -> None:
            for call in calls:
                if waiting.is_set():  # else this thread has hung, and another one makes the calls
                    ended.put(_outcome(call))

        # A daemon thread: a call that hangs does not keep the process from ending.
        thread = threading.Thread(target=work, daemon=True)
        outcomes: list[Outcome[T]] = []
        try:
            thread.start()
            while len(outcomes) < len(calls):
                outcomes.append(ended.get(timeout=self.seconds))
            thread.join(self.seconds)
        except Empty:
            where = "".join(traceback.format_stack(sys._current_frames().get(thread.ident or 0)))
            outcomes.append(([], PluginTimeoutError(self.seconds, where)))
            self.seconds /= 2
        finally:  # by Ctrl-C, too
            waiting.clear()
        return outcomes


def _outcome(call: Callable[[], T]) -> Outcome[T]:
    try:
        return [call()], None
    except KeyboardInterrupt as raised:  # a user's Ctrl-C arrives on the main thread
        error = RuntimeError("raised KeyboardInterrupt by itself")
        error.__cause__ = raised
        return [], error
    except BaseException as raised:  # raised again in the caller's thread
        return [], raised
