"""Name the ranks that other ranks wait for.

A rank inside a collective cannot be told that the others never come. So in a world of several each process
has one thread, the watch, which looks where the main thread stands. Nothing here runs in a step.

    watch of each rank, every LOOK_SECONDS
    --------------------------------------
    `asked` grew: set where/RANK = operation, place
    still inside an operation of the Accelerator for TELL_SECONDS:
      one rank speaks for all: it asks, and writes to stderr which ranks are elsewhere
    still for almost as long as a collective may take: all ranks write their stacks
    `over` is set: end, before the store does

    its last run ends: set where/RANK = "has ended its run"
    rank that serves the store: set `over`, and wait until `left` counts all ranks

Keys lie under the prefix of one watch, `watch/N`. Ranks make and end runs in the same order, so their counts
N agree. A run that its program drops ends when the process exits: ranks collect garbage at different times.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout

from accel_core import tell, uncaught_error
from accel_monitor.stacks import remove_stacks, write_stacks

if TYPE_CHECKING:
    from accel_core import Run, World

__all__ = ["Watch"]

LOOK_SECONDS = 2.0
"""Between two looks into the store."""
TELL_SECONDS = 30.0
"""Between two messages that name the ranks that are waited for."""
FOLDER: Final = "hangs"
"""Folder in the project's, for the stacks of ranks that make no progress."""
IDLE: Final = 0.05
"""Share of a CPU below which a process counts as idle."""
LIBRARY: Final = str(Path(os.__file__).parent) + os.sep
WAITING: Final = ("torch.distributed", "torch.autograd", "torch.nn", "torch._ops")
"""Modules whose functions wait for other ranks, or for devices that do."""

_watches = count()


class Watch:
    """The thread of this process, which its runs share.

    backwards: how many this rank has begun, for the message; counted by the caller.
    """

    _current: ClassVar[Watch | None] = None

    @classmethod
    def of(cls, run: Run) -> Watch:
        """Return the watch of this process, for `add`."""
        if cls._current is None or cls._current._store_is_gone:
            cls._current = cls(run.world)
        return cls._current

    def __init__(self, world: World) -> None:
        assert world.store is not None
        self._store = PrefixStore(f"watch/{next(_watches)}", world.store)
        self._runs, self._users = count(), 0
        self._calls: dict[int, Callable[[Store], None]] = {}
        self._rank, self._size = world.rank, world.size
        self._serves = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._main = threading.main_thread().ident
        self.backwards = 0
        self._ending = threading.Event()
        self._store_is_gone = False
        self._position: tuple[Any, ...] = ()
        self._since = self._cpu_seconds = self._told = 0.0
        self._heard = -1
        self._stacks, self._is_reported = 0, False
        self._thread = threading.Thread(target=self._run, name="accel-watch", daemon=True)

    def add(self, run: Run, call: Callable[[Store], None] | None) -> Callable[[], None]:
        """Watch for one more run, whose time-out and folder hold from now on; return what ends its use.

        call: made at each look and at the end, with a store of the run's where no request waits for another
        rank. A call that raises is made no more, and a line says so.
        """
        project = run.config.project.project_dir
        # Ranks that wait report before their collective's time-out, which unwinds the stack: a look may be
        # late at the beginning and at the end, and the report waits two for answers.
        self._timeout = timeout = (run.config.process_group.timeout or default_pg_timeout).total_seconds()
        self._patience = max(timeout - 8 * LOOK_SECONDS, timeout / 2)
        self._folder = Path(project, FOLDER) if project and "://" not in project else None
        number = next(self._runs)
        self._users += 1
        if call is not None:
            self._calls[number] = call
        if number == 0:
            self._thread.start()
        return partial(self._leave_run, number)

    def _leave_run(self, number: int) -> None:
        """Make the run's call once more; with the last run end the thread."""
        self._users -= 1
        if self._users == 0:
            self._ending.set()
            self._thread.join(LOOK_SECONDS)
        with suppress(RuntimeError):
            if not self._store_is_gone:
                self._make_call(number)
        self._calls.pop(number, None)
        if self._users == 0:
            self._end()

    def _end(self) -> None:
        """Tell ranks that ask that this one has ended.

        The rank that serves the store lets its clients leave first: torch writes a page of warnings for each
        client that looks into a store that is gone. After an error it waits for no rank.
        """
        if Watch._current is self:
            Watch._current = None
        with suppress(RuntimeError):
            if not self._store_is_gone:
                self._heard = sys.maxsize  # this answer holds for every question to come
                self._answer({"where": "has ended its run", "backwards": self.backwards})
                if uncaught_error() is None:
                    self._leave()
            deadline = time.monotonic() + (2 * LOOK_SECONDS if uncaught_error() is None else 0.0)
            while self._serves and self._store.add("left", 0) < self._size and time.monotonic() < deadline:
                time.sleep(0.01)

    def _leave(self) -> None:
        self._store_is_gone = True
        if self._serves:
            self._store.set("over", "")
        self._store.add("left", 1)

    def _run(self) -> None:
        try:
            while not self._ending.wait(LOOK_SECONDS):
                if self._store.check(["over"]):
                    self._leave()
                    return
                self._look()
                for number in [*self._calls]:
                    self._make_call(number)
        except RuntimeError:  # the store is gone, and with it the ranks that could ask
            self._store_is_gone = True

    def _make_call(self, number: int) -> None:
        call = self._calls.get(number)  # the run may have ended meanwhile
        try:
            if call is not None:
                call(PrefixStore(f"run/{number}", self._store))
        except RuntimeError:  # the store's, which is gone
            raise
        except Exception as error:
            tell(f"accel: the watch no longer calls {call}, which raised {error!r}\n")
            self._calls.pop(number, None)

    def _look(self) -> None:
        """Note since when the main thread stands still, answer a question, or speak up."""
        seen = _seen(self._main)
        cpu_seconds, now = time.process_time(), time.monotonic()
        idle = cpu_seconds - self._cpu_seconds < IDLE * LOOK_SECONDS
        if seen.position != self._position or not idle:
            self._position, self._since, self._told = seen.position, now, 0.0
            self._is_reported = False
        self._cpu_seconds = cpu_seconds
        still = now - self._since
        state = {"where": seen.where, "operation": seen.operation, "backwards": self.backwards}
        asked = self._store.add("asked", 0)
        if asked != self._heard:
            self._heard = asked
            self._answer(state)
            wanted = self._store.add("stacks", 0)
            if wanted != self._stacks:  # another rank has reported
                self._stacks, self._is_reported = wanted, True
                write_stacks(self._folder, self._rank, seen.where)
        elif still >= (self._patience if seen.waits else self._timeout) and not self._is_reported:
            self._report(seen)
        elif seen.waits and seen.operation is not None and still - self._told > TELL_SECONDS:
            self._told = still
            self._answer(state)
            # One rank speaks for all that stand in the same operation.
            if self._store.add(f"speaker/{int(time.time() / TELL_SECONDS)}", 1) == 1:
                self._speak(seen.operation)

    def _answer(self, state: Mapping[str, Any]) -> None:
        self._store.set(f"where/{self._rank}", json.dumps({**state, "asked": self._heard}))

    def _report(self, seen: _Seen) -> None:
        """Have each rank write its stacks, and say where ranks are that are elsewhere."""
        self._is_reported = True
        wanted, first = self._store.add("stacks", 1), self._stacks + 1
        self._stacks = wanted
        is_written = write_stacks(self._folder, self._rank, seen.where)
        if wanted == first:  # else another rank does, at this moment
            still = time.monotonic() - self._since
            answers = self._ask()
            away = {rank: answer for rank, answer in answers.items() if answer.get("where") != seen.where}
            if self._folder is not None:
                remove_stacks(self._folder, (rank for rank, answer in answers.items() if not answer))
            there = f"elsewhere: {_listed(away)}" if away else "all ranks are there"
            tell(
                f"accel: rank {self._rank} ({seen.where}) makes no progress for {still:.0f} s; {there};"
                f" stacks of all ranks: {self._folder if is_written else 'on the stderr of each'}\n"
            )

    def _speak(self, operation: str) -> None:
        """Name the ranks that are not in this rank's operation."""
        answers = self._ask()
        absent = {rank: answer for rank, answer in answers.items() if answer.get("operation") != operation}
        if absent:
            still = time.monotonic() - self._since
            waits = f"rank {self._rank} has waited {still:.0f} s in {operation} for {_listed(absent)}"
            tell(f"accel: {waits}{self._fewer(absent)}\n")

    def _fewer(self, absent: Mapping[int, Mapping[str, Any]]) -> str:
        """Return the end of the message where a rank has begun fewer backwards, as after a skipped batch."""
        made = {rank: answer.get("backwards", self.backwards) for rank, answer in absent.items()}
        rank = min(made, key=lambda each: made[each])
        if made[rank] >= self.backwards:
            return ""
        return (
            f"; rank {rank} has made {made[rank]} backwards, and rank {self._rank} is in number"
            f" {self.backwards}: where a rank leaves a batch out, as for a loss that is nan, all must:"
            " accelerator.any(flag)"
        )

    def _ask(self) -> dict[int, Mapping[str, Any]]:
        """Ask the other ranks where they are; {} for a rank that does not answer within two looks."""
        asked = self._store.add("asked", 1)
        self._ending.wait(2 * LOOK_SECONDS)
        answers = {rank: self._answer_of(rank) for rank in range(self._size) if rank != self._rank}
        return {rank: answer if answer.get("asked", -1) >= asked else {} for rank, answer in answers.items()}

    def _answer_of(self, rank: int) -> Mapping[str, Any]:
        """Return the last answer of a rank; {} if it never answered."""
        key = f"where/{rank}"
        answer: Mapping[str, Any] = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        return answer


def _listed(answers: Mapping[int, Mapping[str, Any]]) -> str:
    shown = [f"rank {rank} ({answer.get('where', 'does not answer')})" for rank, answer in answers.items()]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


class _Seen(NamedTuple):
    """Place of a thread, without its frames.

    A frame would keep a function's locals alive, such as a model.
    """

    position: tuple[Any, ...]
    where: str
    """The place in words."""
    operation: str | None
    """The name of the operation of the Accelerator that the thread is in."""
    waits: bool
    """True if it is in code of torch that waits for ranks or devices."""


def _seen(thread: int | None) -> _Seen:
    frames = []
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    where, operation = _place(frames)
    return _Seen(
        position=tuple((id(frame.f_code), frame.f_lasti) for frame in frames),
        where=where,
        operation=operation,
        waits=bool(frames) and _module(frames[0]).startswith(WAITING),
    )


def _place(frames: Sequence[FrameType]) -> tuple[str, str | None]:
    """Return a thread's place in words, and its operation of the Accelerator.

    frames: of the thread, the innermost first.
    """
    operation = None
    for frame in frames:
        root, file = _module(frame).partition(".")[0], frame.f_code.co_filename
        if root.startswith("accel_"):
            operation = frame.f_code.co_name
        elif root != "torch" and (not file.startswith(("<", LIBRARY)) or "site-packages" in file):
            line = f"{Path(file).name}:{frame.f_lineno}"
            return (f"in {operation}, {line}" if operation else f"at {line}"), operation
    return f"in {operation}" if operation else "in no code of its own", operation


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
