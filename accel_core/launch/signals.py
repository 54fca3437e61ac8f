"""Signals to the launcher, and their effect on its workers beside that of torch's agent."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from accel_core.launch.worker import WARNING

ENDING_SECONDS: Final = 30
"""Seconds that workers have between the signal that stops them and SIGKILL."""
HANDLED: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", WARNING)


class Signals:
    """Handlers of the launcher, while the context lasts.

    The first Ctrl-C or SIGTERM has torch's agent end the workers, and a second Ctrl-C kills them. A
    scheduler's warning becomes a SIGTERM of the workers: they save, and end by themselves, in their own time.

    workers: returns the processes of the workers that have started.
    """

    def __init__(self) -> None:
        self.workers: Callable[[], Sequence[int]] = tuple
        self.is_warned = False
        self._is_stopped = False
        self._warned: set[int] = set()
        is_main = threading.current_thread() is threading.main_thread()
        numbers = [number for number in signal.Signals if number.name in HANDLED] if is_main else []
        self._before = {number: signal.getsignal(number) for number in numbers}

    def __enter__(self) -> None:
        """Take note of a warning, which otherwise ends this process, and end by SIGTERM.

        The first process of a container has no end by default.
        """
        for number in self._before:
            if number.name == WARNING:
                signal.signal(number, self._warn)
            elif number == signal.SIGTERM:
                signal.signal(number, _exit)

    def __exit__(self, *_: object) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def poll(self) -> None:
        """Take what stops this process, from torch too, and pass a warning on. Called ten times a second."""
        for number in self._before:
            if number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._stop)
        if self.is_warned:
            self._send(signal.SIGTERM, set(self.workers()) - self._warned)
            self._warned |= set(self.workers())

    def _warn(self, *_: object) -> None:
        self.is_warned = True

    def _stop(self, number: int, _: object) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        if not self._is_stopped:
            self._is_stopped = True
            if number == signal.SIGINT and self.workers():
                sys.stderr.write(f"accel: the processes have {ENDING_SECONDS} s; another Ctrl-C kills them\n")
            raise SignalException(f"signal {number}", sigval=signal.Signals(number))
        if number == signal.SIGINT:  # a second SIGTERM may be the first one, passed on by a shell
            self._send(getattr(signal, "SIGKILL", signal.SIGTERM), self.workers())

    def _send(self, number: int, processes: Sequence[int] | set[int]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)
