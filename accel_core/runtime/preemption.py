"""Stop all ranks after the same step, once any of them is told to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.contract.run import Run

LOOK_SECONDS: Final = 0.25
"""Seconds until a rank notices that it was told, and in a small job that another rank was."""
FEW_RANKS: Final = 64
"""Ranks that all look in the store so often. More ranks look less often, as one process serves them all."""
MOST_SECONDS: Final = 4.0
"""Seconds until a rank of a large job notices that another was told."""
STOP_FILE: Final = "ACCEL_STOP_FILE"
"""Variable by which a scheduler's job names a file of its node, empty at first.

It reads there how ranks ended that it told to stop: `watching` if by themselves, `stopped` if they have to
go on later. The file stays empty if they never look for signals.
"""
_made: Final = count()
"""All ranks make them in one order, and each has keys of its own."""


class StopSignals:
    """The signals that tell a run to stop, once it watches for them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._preemption: Preemption | None = None
        self._is_stopping = False

    def is_told(self, signals: Sequence[int], check: Callable[[], None]) -> bool:
        """Ask whether all ranks stop now, because one was told to.

        All ask, after each step. The first call begins to watch for these signals, if `check` does not raise.

        Raises:
            CheckpointError: a rank does not answer.
        """
        if self._preemption is None:
            check()
            self._preemption = Preemption(self._run, signals)
        # A checkpoint holds no gradients: within a window there is nothing to ask yet.
        self._is_stopping = all(unit.window.boundary for unit in self._run.units) and self._preemption.due()
        return self._is_stopping

    def hear(self) -> None:
        """Let a signal end the process again, unless it saves because of one: that comes more than once."""
        if self._preemption is not None and not self._is_stopping:
            self._preemption.end()

    def end(self) -> None:
        """Watch for signals no more."""
        if self._preemption is not None:
            self._preemption.end()


class Preemption:
    """Watch for signals on any rank until `end`, or until the run is gone.

    Made in the main thread. To forked children the signals do what they did before.

    A rank that was told says so in the store, where a thread of each rank looks: a step costs nothing.
    On hearing, each thread says after which step its rank could stop at the earliest, and all stop after
    the latest of these. Threads agree, not ranks: one of these may stand in a collective that waits for
    another, which must know first that it has to go on.
    """

    def __init__(self, run: Run, signals: Iterable[int]) -> None:
        from accel_core.distributed.mailbox import mailbox_of  # late: start-up need not wait for it

        self._rank, self._ranks = run.world.rank, run.world.size
        self._pause = min(MOST_SECONDS, LOOK_SECONDS * max(1, self._ranks / FEW_RANKS))
        self._votes = mailbox_of(run).under(f"preemption/{next(_made)}")
        self._told = self._heard = False
        self._steps, self._last = 0, 0
        self._lock, self._agreed, self._ended = threading.Lock(), threading.Event(), threading.Event()
        self._failure = ""
        self._process = os.getpid()
        self._before = {number: signal.signal(number, self._tell) for number in signals}
        weakref.finalize(run, self.end).atexit = False
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)
        self._thread.start()
        _note("watching")

    def due(self) -> bool:
        """Ask whether all ranks stop now. Every rank asks, after each step.

        Raises:
            CheckpointError: a rank does not answer.
        """
        with self._lock:
            self._steps += 1
            if not self._heard:
                return False
        self._agreed.wait()
        if self._failure:
            raise CheckpointError(self._failure)
        if self._steps < self._last:
            return False
        _note("stopped")
        return True

    def end(self) -> None:
        """Leave the signals to whom they belonged. From any thread, any number of times."""
        with self._lock:
            first = not self._ended.is_set()
            self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(4 * LOOK_SECONDS)  # it may stand in a store whose process is gone
        with suppress(ValueError):  # only the main thread may; `_tell` hands them on until then
            for number in [*self._before]:
                self._give_back(number)
        if first and not self._heard:
            with suppress(RuntimeError):  # the store may have ended already; then no rank asks
                # Others may hear yet: this rank does not keep them from stopping.
                self._answer(self._steps + 1)

    def _give_back(self, number: int) -> None:
        if signal.getsignal(number) == self._tell:
            # None: the handler was not Python's, and cannot be installed again.
            signal.signal(number, self._before[number] or signal.SIG_DFL)

    def _tell(self, number: int, frame: object) -> None:
        if self._ended.is_set() or os.getpid() != self._process:
            handler = signal.signal(number, self._before[number] or signal.SIG_DFL)
            try:
                signal.raise_signal(number)
            finally:
                if handler != self._tell:  # a later one, which has called this one
                    signal.signal(number, handler)
            return
        self._told = True  # again and again, if launcher and scheduler both tell us

    def _watch(self) -> None:
        try:
            if not self._wait_until_told():
                return
            with self._lock:
                if self._ended.is_set():  # `end` answers
                    return
                self._heard, earliest = True, self._steps + 1
            self._answer(earliest)
            deadline = time.monotonic() + self._votes.timeout
            while not self._votes.has("last"):
                if self._ended.wait(self._pause / 10):
                    return
                if time.monotonic() > deadline:
                    silent = [rank for rank in range(self._ranks) if not self._votes.has(f"{rank}")]
                    raise RuntimeError(f"no answer from rank(s) {', '.join(map(str, silent))}")
            self._last = self._votes.read("last")["step"]
        except Exception as error:  # of the store, whose process has ended, for example: `due` raises it
            self._failure = (
                f"this job was told to stop, but its ranks cannot agree when: {error}\nit cannot save"
            )
            self._heard = True
        self._agreed.set()

    def _wait_until_told(self) -> bool:
        """Return True once this rank or another was told, False if the run has ended before."""
        next_look = 0.0
        while not self._told:
            if time.monotonic() >= next_look:
                if self._votes.has("told"):
                    return True
                next_look = time.monotonic() + self._pause
            if self._ended.wait(LOOK_SECONDS):
                return False
        self._votes.put("told", {})
        return True

    def _answer(self, earliest: int) -> None:
        """Say after which step this rank could stop. The last rank to answer says after which all do."""
        self._votes.put(f"{self._rank}", {"step": earliest})
        if self._votes.count("answers") == self._ranks:
            last = max(self._votes.read(f"{rank}")["step"] for rank in range(self._ranks))
            self._votes.put("last", {"step": last})


def _note(word: str) -> None:
    """Tell the scheduler's job. A later loop does not undo `stopped`."""
    file = Path(os.environ.get(STOP_FILE, ""))
    if file.is_file() and (word == "stopped" or not file.stat().st_size):
        file.write_text(word, encoding="utf-8")
