"""Waits for what goes to a store: they end, though the store may hang."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Final
from weakref import WeakSet

from accel_core.contract.run import live_runs
from accel_core.errors import uncaught_error

LOOK_SECONDS: Final = 0.5
"""Between two looks at what is waited for; Ctrl-C is heard then."""
FAILED_SECONDS: Final = 60.0
"""Seconds that a process that failed waits."""
_sendings: Final[WeakSet[Sending]] = WeakSet()


class Sending:
    """A work on a store, done by a daemon thread of this process.

    done: is set once it is over. patience: the most seconds that all waits for it last together.
    """

    def __init__(self, done: threading.Event, patience: float) -> None:
        self._done, self._patience = done, patience
        self._deadline: float | None = None
        self._is_interrupted = False
        self._process = os.getpid()
        _wait_at_exit()
        _sendings.add(self)

    def join(self, patience: float | None = None) -> bool:
        """Return True once it is over; False after `patience` seconds.

        False, too, after those of all waits. After one that Ctrl-C ended, only one without `patience` waits
        again.
        """
        now = time.monotonic()
        self._deadline = now + self._patience if self._deadline is None else self._deadline
        if self._is_interrupted and patience is not None:
            patience = 0
        deadline = self._deadline if patience is None else min(self._deadline, now + patience)
        try:
            return wait_for(self._done, deadline)
        except KeyboardInterrupt:
            self._is_interrupted = True
            raise

    def not_over(self, patience: float | None) -> str:
        """Words for a wait that `join` has given up."""
        if self._is_interrupted:
            return "was not over when its wait was interrupted"
        return f"was not over after {self._patience if patience is None else patience:g} s"

    def join_at_exit(self) -> None:
        """Wait for the last time."""
        if self._process == os.getpid():
            try:
                self.join(None if uncaught_error() is None else FAILED_SECONDS)
            finally:
                self._deadline = 0.0


def wait_for(done: threading.Event, deadline: float) -> bool:
    """Return True once it is set; False after the deadline.

    Ctrl-C is heard meanwhile.
    """
    while not done.wait(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
    return True


def do_once(turn: threading.Lock, action: Callable[[], None]) -> None:
    """Do it, unless another thread has taken the turn before.

    So a work is done by its thread or given up by the `start` that Ctrl-C ended, whichever comes first.
    """
    if turn.acquire(blocking=False):
        action()


@cache
def _wait_at_exit() -> None:
    """Let the process wait before Python ends pools of threads.

    Stores' libraries need these, to look up a host for instance: `atexit` is too late.
    """
    import concurrent.futures.thread  # noqa: F401 - its own end was registered before, and comes after

    with suppress(RuntimeError):  # it ends already
        threading._register_atexit(_join_all)  # type: ignore[attr-defined]


def _join_all() -> None:
    for run in [*live_runs]:
        run.checkpoints.interrupt_by_signals()
    for sending in [*_sendings]:
        with suppress(KeyboardInterrupt):
            sending.join_at_exit()
