"""Stop all ranks after the same step, once any of them gets a stop signal."""

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
"""Seconds until a rank notices its own signal and, in a small job, another rank's signal."""
FEW_RANKS: Final = 64
"""Number of ranks up to which all look in the store every LOOK_SECONDS.

More ranks look less often, since one process serves all requests.
"""
MOST_SECONDS: Final = 4.0
"""Seconds until a rank of a large job notices another rank's signal."""
STOP_FILE: Final = "ACCEL_STOP_FILE"
"""Variable that names a file of the node, from which a scheduler's job learns how its ranks ended.

The file is empty at first, and stays empty if ranks never watch for signals. After a stop signal, `watching`
means that they ended by themselves, and `stopped` that they have to continue later.
"""
_made: Final = count()
"""Numbers the `Preemption`s, so that each has its own keys. All ranks create them in the same order."""


class StopSignals:
    """The signals that tell a run to stop, once the run watches for them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._preemption: Preemption | None = None
        self._is_stopping = False

    def should_stop(self, signals: Sequence[int], check: Callable[[], None]) -> bool:
        """Return whether all ranks stop now, because a rank was told to stop.

        Call it on all ranks after each step. The first call begins to watch for these signals, unless `check`
        raises.

        Raises:
            CheckpointError: a rank does not answer.
        """
        if self._preemption is None:
            check()
            self._preemption = Preemption(self._run, signals)
        # A checkpoint holds no gradients, so ranks never stop within a window.
        self._is_stopping = all(unit.window.boundary for unit in self._run.units) and self._preemption.due()
        return self._is_stopping

    def restore_default_handlers(self) -> None:
        """Let signals end the process again, except during a save that a signal caused: signals repeat."""
        if self._preemption is not None and not self._is_stopping:
            self._preemption.end()

    def end(self) -> None:
        """Stop watching for signals."""
        if self._preemption is not None:
            self._preemption.end()


class Preemption:
    """Watch for signals on any rank until `end`, or until the run is gone.

    Created in the main thread. Forked children keep the earlier handlers of the signals.

    A rank that gets a signal writes to the store, in which a thread of each rank looks: a step costs nothing.
    Each thread then writes the earliest step after which its rank could stop, and all ranks stop after the
    latest of these steps. Threads agree, not ranks: a rank may be waiting in a collective for another rank,
    which must know first that it has to go on.
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
        """Return whether all ranks stop now. Call it on all ranks after each step.

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
        """Restore the earlier signal handlers. Callable from any thread, any number of times."""
        with self._lock:
            first = not self._ended.is_set()
            self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(4 * LOOK_SECONDS)  # not forever: the store's process may be gone
        with suppress(ValueError):  # only the main thread sets handlers; else `_tell` passes signals on
            for number in [*self._before]:
                self._give_back(number)
        if first and not self._heard:
            with suppress(RuntimeError):  # the store may have ended already: then no rank needs an answer
                # Other ranks may still get a signal, and stop only once all ranks have answered.
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
                if handler != self._tell:  # a handler that was installed later, and has called `_tell`
                    signal.signal(number, handler)
            return
        self._told = True  # several times, if launcher and scheduler both send a signal

    def _watch(self) -> None:
        try:
            if not self._wait_until_told():
                return
            with self._lock:
                if self._ended.is_set():  # `end` answers for this rank
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
        except Exception as error:  # such as the store's, whose process has ended: `due` raises it
            self._failure = (
                f"this job was told to stop, but its ranks cannot agree when: {error}\nit cannot save"
            )
            self._heard = True
        self._agreed.set()

    def _wait_until_told(self) -> bool:
        """Return True once this rank or another gets a signal, False if the run ends first."""
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
        """Write after which step this rank could stop; the last rank to answer writes the step for all."""
        self._votes.put(f"{self._rank}", {"step": earliest})
        if self._votes.count("answers") == self._ranks:
            last = max(self._votes.read(f"{rank}")["step"] for rank in range(self._ranks))
            self._votes.put("last", {"step": last})


def _note(word: str) -> None:
    """Write to the scheduler's STOP_FILE. `stopped` is never overwritten by a later loop."""
    file = Path(os.environ.get(STOP_FILE, ""))
    if file.is_file() and (word == "stopped" or not file.stat().st_size):
        file.write_text(word, encoding="utf-8")
