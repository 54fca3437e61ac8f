"""Signals to the launcher, and their effect on its workers, beside the effect of torch's agent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

from accel_core.distributed.stderr import tell
from accel_core.launch.worker import WARNING

if TYPE_CHECKING:
    from accel_core.errors import LaunchError

ENDING_SECONDS: Final = 30
"""Seconds between the signal that stops workers and SIGKILL."""
KILL: Final = getattr(signal, "SIGKILL", signal.SIGTERM)
HANDLED: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", WARNING)


class Signals:
    """Signal handlers of the launcher, while the context lasts.

    A signal that stops the launcher is sent to the workers by process ID. torch would also send it to their
    children, such as processes that read data, before the workers have saved. Workers that have not ended
    30 s later are killed, and so are the children that they leave. A second Ctrl-C kills at once. A
    scheduler's warning becomes a SIGTERM to the workers, which save, and end in their own time.
    """

    def __init__(self) -> None:
        self.workers: Callable[[], Sequence[int]] = tuple
        """Returns the process IDs of the workers that have started."""
        self.is_warned = False
        self.stopped: signal.Signals | None = None
        """The signal that stopped the launcher."""
        self._deadline = float("inf")
        self._told: set[int] = set()
        is_main = threading.current_thread() is threading.main_thread()
        numbers = [number for number in signal.Signals if number.name in HANDLED] if is_main else []
        self._before = {number: signal.getsignal(number) for number in numbers}

    def __enter__(self) -> None:
        """Handle the scheduler's warning and SIGTERM.

        By default the warning would end this process, and SIGTERM would not end it as the first process of a
        container.
        """
        for number in self._before:
            if number.name == WARNING:
                signal.signal(number, self._warn)
            elif number == signal.SIGTERM:
                signal.signal(number, self._stop)

    def __exit__(self, *_: object) -> None:
        """Restore the handlers that were set before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def poll(self) -> None:
        """Set the handlers that torch has replaced, and pass signals on. Called ten times a second."""
        for number in self._before:
            if number.name != WARNING:
                signal.signal(number, self._stop)
        if self.stopped or self.is_warned:  # for workers that have started since
            self._send(self.stopped or signal.SIGTERM, set(self.workers()) - self._told)
        if time.monotonic() > self._deadline and (late := self._send(KILL, self.workers())):
            tell(f"accel: {late} process(es) had not ended after {ENDING_SECONDS} s and were killed\n")
            self._end()

    def end_children(self) -> None:
        """Kill the children that stopped workers have left running: some children ignore SIGTERM."""
        for process in self._told if self.stopped and hasattr(os, "killpg") else ():
            with suppress(ProcessLookupError, PermissionError):  # no children; on macOS, zombies only
                os.killpg(process, KILL)  # torch gives each worker of a script a group of its own

    def end_if_stopped(self, failure: LaunchError | None) -> None:
        """End this process as the signal that stopped it does; print a failure of a worker meanwhile."""
        if self.stopped:
            if failure is not None and self.stopped != signal.SIGINT:
                tell(f"accel: stopped by {self.stopped.name}: {failure}\n")
            self._end()

    def _end(self) -> NoReturn:
        assert self.stopped
        if self.stopped == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + self.stopped)

    def _warn(self, *_: object) -> None:
        self.is_warned = True

    def _stop(self, number: int, _: object) -> None:
        if self.stopped is None:
            self.stopped, self._deadline = signal.Signals(number), time.monotonic() + ENDING_SECONDS
            if sys.platform == "win32" or not self._send(number, self.workers()):
                self._end()  # no worker runs, or Windows: torch ends the rest
            more = "; another Ctrl-C kills them" if number == signal.SIGINT else " to save and end"
            tell(f"accel: the processes have {ENDING_SECONDS} s{more}\n")
        elif number == signal.SIGINT:  # a second SIGTERM may be the first, passed on by a shell
            self._send(KILL, self.workers())

    def _send(self, number: int, processes: Iterable[int]) -> int:
        """Send a signal to workers; return the number of workers that are alive."""
        reached = 0
        for process in processes:
            self._told.add(process)
            with suppress(ProcessLookupError):
                os.kill(process, number)
                reached += 1
        return reached
