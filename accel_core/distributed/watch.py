"""Ranks that wait name the ranks they wait for.

Ranks come together in the store before an operation that is rare and long: whoever waits there can be
told that others never come, which a rank inside a collective cannot. One thread a process, only in a
world of several, says where this rank is when another asks, and speaks up for a rank that waits long
inside a collective. Nothing here runs in a step.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from accel_core.errors import CollectiveError, module_that_raised

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_core.contract.run import Run
    from accel_core.contract.world import World

__all__ = ["assemble", "lost_peer", "start", "stop"]

LOOK_SECONDS = 2.0
"""Between two looks for a question in the store."""
STUCK_SECONDS = 10.0
"""A rank in one of our operations that has waited for others this long, without using CPU, is stuck."""
TELL_SECONDS = 30.0
"""How often the ranks that are waited for are named."""
REQUESTS: Final = 20_000
"""A second, that ranks which wait make of the store together, at most."""
IDLE: Final = 0.05
"""Share of a CPU below which a process counts as doing nothing."""
LOST: Final = re.compile(r"connection (closed|reset)|timed out|broken pipe|peer", re.IGNORECASE)
"""As torch's backends say that they lost another rank."""
LIBRARY: Final = str(Path(os.__file__).parent) + os.sep
COLLECTIVES: Final = "accel_core.distributed.process_group"
WAITING: Final = ("torch.distributed", "torch.autograd", "torch.nn", "torch._ops")
"""Modules whose functions wait for nothing but other ranks, and devices that wait for those."""

# In step on all ranks, which make groups and assemble in the same order.
_meetings, _watches = count(), count()
_watch: Watch | None = None


def start(store: Store, world: World, *, serves: bool) -> None:
    """Begin to answer other ranks' questions. Counted with `stop`.

    store: the thread's own clone. serves: the store lives in this process and ends with it.
    """
    global _watch  # noqa: PLW0603 - one thread a process
    if _watch is None:
        _watch = Watch(store, world, serves=serves)
    _watch.users += 1


def stop() -> None:
    """Undo one `start`; after the last, other ranks that ask hear that this one has ended."""
    global _watch  # noqa: PLW0603
    if _watch is not None:
        _watch.users -= 1
        if not _watch.users:
            _watch.end()
            _watch = None


def assemble(run: Run, operation: str, brings: str = "") -> None:
    """Return once every rank of the world makes this operation. Collective.

    brings: what must be equal on all ranks, in words.

    Raises:
        CollectiveError: ranks make another operation or bring something else, one that is waited for
            cannot come because it is stuck in an operation that waits for this rank, or the process
            group's time-out has passed. Raised on all ranks that wait.
    """
    if run.world.size > 1 and _watch is not None:
        Meeting(run, _watch, f"{operation}{brings and f' of {brings}'}").hold()


def lost_peer(run: Run, operation: str, error: RuntimeError) -> CollectiveError | None:
    """What an error of torch's own collectives means; None if it is no error of a lost connection."""
    first = str(error).partition("\n")[0]
    if _watch is None or run.world.store is None or not LOST.search(first):
        return None
    if not module_that_raised(error).startswith(WAITING):
        return None
    store, others = _under(_watch.prefix, run.world.store), set(range(run.world.size)) - {run.world.rank}
    try:
        asked = store.add("asked", 1)
        time.sleep(2 * LOOK_SECONDS)
        answers = {rank: answer_of(store, rank) for rank in sorted(others)}
    except RuntimeError:  # the store went down with the rank that served it
        asked, answers = 0, {0: {}}
    elsewhere = {
        rank: said if said.get("asked", asked) >= asked else {}
        for rank, said in answers.items()
        if said.get("operation") != operation or said.get("asked", asked) < asked
    }
    return CollectiveError(
        f"{operation}: rank {run.world.rank} lost {listed(elsewhere) or 'the others'}\n{first}\n"
        "look at what those ranks did: they died, hang, or took another branch",
        operation=operation,
    )


class Meeting:
    """One `assemble`, as this rank sees it. The first rank to come asks after those that are not there."""

    def __init__(self, run: Run, watch: Watch, what: str) -> None:
        from torch.distributed.distributed_c10d import default_pg_timeout

        assert run.world.store is not None
        self.store, self.world, self.what = _under(watch.prefix, run.world.store), run.world, what
        self.number = next(_meetings)
        self.key = f"meeting/{self.number}"
        timeout = run.config.process_group.timeout or default_pg_timeout
        self.begun = time.monotonic()
        self.patience = timeout.total_seconds()

    def hold(self) -> None:
        """See `assemble`."""
        self.store.set(f"{self.key}/{self.world.rank}", self.what)
        number = self.store.add(f"{self.key}/came", 1)
        if number == self.world.size:
            self.store.set(f"{self.key}/verdict", self._compared())
            for left in ("came", "verdict"):  # of the meeting before, which all ranks have left
                self.store.delete_key(f"meeting/{self.number - 1}/{left}")
        verdict = self._verdict(asks=number == 1)
        if verdict:
            raise CollectiveError(verdict, operation=self.what)
        self.store.delete_key(f"{self.key}/{self.world.rank}")

    def _compared(self) -> str:
        every = [
            word.decode() for word in self.store.multi_get([f"{self.key}/{rank}" for rank in self._ranks])
        ]
        if len(set(every)) == 1:
            return ""
        listed = "\n".join(f"  rank {rank}: {word}" for rank, word in enumerate(every))
        name = self.what.partition(" of ")[0]
        return f"{name}: the ranks did not bring the same\n{listed}\ncall it on all ranks alike"

    @property
    def _ranks(self) -> range:
        return range(self.world.size)

    def _verdict(self, *, asks: bool) -> str:
        """What the meeting came to: nothing if all is well, else why not."""
        key, told = f"{self.key}/verdict", self.begun
        pause, longest = 0.001, 0.05 + self.world.size / REQUESTS
        looked = self.begun
        while not self.store.check([key]):  # torch's own wait logs each time that it ends in vain
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
            if time.monotonic() - looked < LOOK_SECONDS:
                continue
            looked = time.monotonic()
            waited = time.monotonic() - self.begun
            if waited > self.patience + LOOK_SECONDS:  # the rank that asks may be gone
                return self._in_vain(self._absent(), "in vain")
            if asks and (reason := self._asked(waited, tell=time.monotonic() - told > TELL_SECONDS)):
                self.store.set(key, reason)
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
        return self.store.get(key).decode()

    def _absent(self) -> Mapping[int, Mapping[str, Any]]:
        """The ranks that have not come, and what each last said of itself."""
        gone = [rank for rank in self._ranks if not self.store.check([f"{self.key}/{rank}"])]
        return {rank: answer_of(self.store, rank) for rank in gone}

    def _asked(self, waited: float, *, tell: bool) -> str:
        """Why the others will not come, once that is certain; "" until then."""
        absent = self._absent()
        if waited > self.patience:
            return self._in_vain(absent, "in vain")
        if absent and all(answer.get("stuck") for answer in absent.values()):
            return self._in_vain(absent, "which will not come")
        self.store.add("asked", 1)
        if tell:
            sys.stderr.write(f"accel: {self._name} has waited {waited:.0f} s for {listed(absent)}\n")
        return ""

    @property
    def _name(self) -> str:
        return self.what.partition(" of ")[0]

    def _in_vain(self, absent: Mapping[int, Mapping[str, Any]], how: str) -> str:
        came = ", ".join(str(rank) for rank in self._ranks if rank not in absent)
        return (
            f"{self._name} is collective: rank(s) {came} of {self.world.size} waited for {listed(absent)},"
            f" {how}\n"
            f"call {self._name} on all ranks, not on one alone"
        )


class Watch:
    """The thread, and its own connection to the store."""

    def __init__(self, store: Store, world: World, *, serves: bool) -> None:
        self.users = 0
        self.prefix = f"watch/{next(_watches)}"
        self._store = _under(self.prefix, store)
        self._rank, self._size, self._serves = world.rank, world.size, serves
        self._lost = False
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._position: tuple[Any, ...] = ()
        self._since = self._used = 0.0
        self._told = 0.0
        self._heard = -1
        self._thread = threading.Thread(target=self._run, name="accel-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Tell those who ask that this rank has ended.

        The rank that serves the store tells the others to stop first: torch writes a page of warnings
        where they look into a store that is gone.
        """
        self._over.set()
        self._thread.join(LOOK_SECONDS)
        with suppress(RuntimeError):
            if not self._lost:
                self._heard = sys.maxsize  # this answer holds for every question
                self._answer({"where": "has ended its run", "stuck": True})
                self._leave()
            deadline = time.monotonic() + 2 * LOOK_SECONDS
            while self._serves and self._store.add("left", 0) < self._size and time.monotonic() < deadline:
                time.sleep(0.01)

    def _leave(self) -> None:
        self._lost = True
        if self._serves:
            self._store.set("over", "")
        self._store.add("left", 1)

    def _run(self) -> None:
        try:
            self._look_around()
        except RuntimeError:  # the store is gone, and with it the ranks that could ask
            self._lost = True

    def _look_around(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            if self._store.check(["over"]):
                self._leave()
                break
            seen = _seen(self._main)
            self._note(seen.position)
            asked = self._store.add("asked", 0)
            if asked != self._heard:
                self._heard = asked
                self._answer(self._state(seen))
            elif seen.in_collective and self._stood() - self._told > TELL_SECONDS:
                self._speak(seen)

    def _note(self, position: tuple[Any, ...]) -> None:
        used, now = time.process_time(), time.monotonic()
        idle = used - self._used < IDLE * LOOK_SECONDS
        if position != self._position or not idle:
            self._position, self._since, self._told = position, now, 0.0
        self._used = used

    def _stood(self) -> float:
        """Seconds that this rank has not moved."""
        return time.monotonic() - self._since

    def _state(self, seen: _Seen) -> dict[str, Any]:
        stuck = seen.waits_for_ranks and self._stood() >= STUCK_SECONDS
        return {"where": seen.where, "operation": seen.operation, "stuck": stuck}

    def _answer(self, state: Mapping[str, Any]) -> None:
        self._store.set(f"where/{self._rank}", json.dumps({**state, "asked": self._heard}))

    def _speak(self, seen: _Seen) -> None:
        """Name the ranks that are not where this one waits; one rank speaks for all."""
        self._told = self._stood()
        mine = self._state(seen)
        self._answer(mine)
        if self._store.add(f"speaker/{int(time.time() / TELL_SECONDS)}", 1) > 1:
            return
        self._store.add("asked", 1)
        self._over.wait(2 * LOOK_SECONDS)
        answers = {rank: answer_of(self._store, rank) for rank in range(self._size) if rank != self._rank}
        absent = {rank: said for rank, said in answers.items() if said.get("operation") != mine["operation"]}
        if absent:
            name = mine["operation"] or "a collective"
            sys.stderr.write(
                f"accel: rank {self._rank} has waited {self._stood():.0f} s in {name} for {listed(absent)}\n"
            )


def _under(prefix: str, store: Store) -> Store:
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


def answer_of(store: Store, rank: int) -> Mapping[str, Any]:
    """What a rank last said of itself."""
    key = f"where/{rank}"
    answer: Mapping[str, Any] = json.loads(store.get(key)) if store.check([key]) else {}
    return answer


def listed(ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """Ranks, each with where it is."""
    shown = [f"rank {rank} ({said.get('where', 'does not answer')})" for rank, said in ranks.items()]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


@frozen
class _Seen:
    """Where a thread was. It holds no frame: that would keep alive what a function had, such as a model."""

    position: tuple[Any, ...]
    where: str
    operation: str | None
    waits_for_ranks: bool
    in_collective: bool


def _seen(thread: int | None) -> _Seen:
    frames = list(_frames(thread))
    where, operation = place(frames)
    return _Seen(
        position=tuple((id(frame.f_code), frame.f_lasti) for frame in frames),
        where=where,
        operation=operation,
        waits_for_ranks=operation is not None and _waits_for_ranks(frames),
        in_collective=_in_collective(frames),
    )


def place(frames: Sequence[FrameType]) -> tuple[str, str | None]:
    """Where a thread is, in words, from its innermost frame outwards; and the operation of ours it is in."""
    operation = None
    for frame in frames:
        root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if root.startswith("accel_"):
            operation = frame.f_code.co_name
        elif root != "torch" and not _is_library(frame.f_code.co_filename):
            line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            return (f"in {operation}, {line}" if operation else f"at {line}"), operation
    return f"in {operation}" if operation else "in no code of its own", operation


def _is_library(file: str) -> bool:
    return file.startswith(("<", LIBRARY)) and "site-packages" not in file


def _frames(thread: int | None) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits_for_ranks(frames: Sequence[FrameType]) -> bool:
    """Whether only other ranks can let a thread go on: not a disk, a terminal, or a loader's workers."""
    inside = str(frames[0].f_globals.get("__name__", "")).startswith(WAITING)
    return inside or _in_collective(frames)


def _in_collective(frames: Sequence[FrameType]) -> bool:
    return any(frame.f_globals.get("__name__") == COLLECTIVES for frame in frames)
