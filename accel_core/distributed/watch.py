"""Name the ranks that other ranks wait for.

A rank inside a collective cannot be told that the others never come. So before an operation that is rare
and long (save, load, prepare) ranks assemble in the group's store, where they can. In a world of several
each process has one thread beside it, the watch. Nothing here runs in a step.

    rank that assembles                            watch of each rank, every LOOK_SECONDS
    -------------------                            --------------------------------------
    set assembly/N/RANK = what it brings           `asked` grew: set where/RANK = operation, place, stuck
    add 1 to assembly/N/came                       stuck in a collective for TELL_SECONDS:
      last to come:  set assembly/N/verdict          one rank speaks for all: it asks, and writes to
        = "", or how the ranks differ                stderr which ranks are elsewhere
      first to come, every LOOK_SECONDS:           `over` is set: end, before the store does
        add 1 to `asked`, read where/* of those
        absent; if all are stuck, or the time is   the run ends: set where/RANK = "has ended its run"
        out: set verdict = which rank is where     rank that serves the store: set `over`, and wait until
    wait for the verdict; raise it unless ""         `left` counts all ranks

Keys lie under the prefix of one watch, `watch/N`. Ranks make groups and assemble in the same order, so their
counts N agree.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakMethod

from accel_core.distributed.silence import FAILING_SECONDS, end_silent
from accel_core.distributed.stacks import remove_stacks, write_stacks
from accel_core.distributed.stderr import tell
from accel_core.errors import CollectiveError, module_that_raised

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_core.contract.run import Run
    from accel_core.contract.world import World

LOOK_SECONDS = 2.0
"""Between two looks into the store."""
STUCK_SECONDS = 10.0
"""Time after which a rank that waits for others counts as stuck.

It waits in one of our operations, without using CPU.
"""
TELL_SECONDS = 30.0
"""Between two messages that name the ranks that are waited for."""
REQUESTS: Final = 20_000
"""Requests per second that all waiting ranks together make of the store, at most."""
HANGS: Final = "hangs"
"""Folder in the project's, for the stacks of ranks that make no progress."""
IDLE: Final = 0.05
"""Share of a CPU below which a process counts as idle."""
LOST: Final = re.compile(r"connection (closed|reset)|timed out|broken pipe|peer", re.IGNORECASE)
"""Words with which torch's backends report that they lost another rank."""
LIBRARY: Final = str(Path(os.__file__).parent) + os.sep
COLLECTIVES: Final = "accel_core.distributed.process_group"
WAITING: Final = ("torch.distributed", "torch.autograd", "torch.nn", "torch._ops")
"""Modules whose functions wait for other ranks, or for devices that do."""

_assemblies, _watches = count(), count()
_watch: Watch | None = None


def start(store: Store, run: Run, world: World, *, serves: bool) -> None:
    """Begin to answer other ranks' questions. Counted with `stop`.

    store: a clone, for the thread alone. serves: the store lives in this process and ends with it.
    The first run says how long ranks may stand still, and where stacks are written then.
    """
    global _watch  # noqa: PLW0603 - one thread a process
    if _watch is None:
        project = run.config.project.project_dir
        folder = Path(project, HANGS) if project and "://" not in project else None
        timeout = timeout_of(run)
        end_silent(store, timeout)
        _watch = Watch(store, world, serves=serves, timeout=timeout, folder=folder)
    _watch.users += 1


def stop() -> None:
    """Undo one `start`; after the last, ranks that ask hear that this one has ended."""
    global _watch  # noqa: PLW0603
    if _watch is not None:
        _watch.users -= 1
        if not _watch.users:
            _watch.end()
            _watch = None


def also(call: Callable[[Store], None]) -> None:
    """Have the watch of this process call a method at each look, and at its end.

    call: takes a store that waits for nobody else. The watch does not keep its object alive. One that raises
    is called no more, and a line says so.
    """
    if _watch is not None:
        _watch.calls.append(WeakMethod(call))


def assemble(run: Run, operation: str, brings: str = "", models: Sequence[str] = ()) -> None:
    """Return once every rank of the world calls this operation. Collective.

    brings: what must be equal on all ranks, in words. models: words that may differ, but not in order only.

    Raises:
        CollectiveError: ranks call another operation or bring something else, an absent rank is stuck in an
            operation that waits for this rank, the process group's time-out has passed, or the machine of
            the store is silent for that time. Raised on all ranks that wait.
    """
    if run.world.size > 1 and _watch is not None:
        try:
            _Assembly(run, _watch.prefix, operation, brings, models).hold()
        except RuntimeError as error:
            raise CollectiveError(
                f"{operation}: rank {run.world.rank} lost the store through which ranks wait for each other\n"
                f"{str(error).partition(chr(10))[0]}\n"
                "check that the machine of rank 0 is running, and that the network reaches it",
                operation=operation,
            ) from error


def places(ranks: Iterable[int]) -> dict[int, str]:
    """Return where the first eight of these ranks are, in words; {} without a watch."""
    some = [*ranks][:8]
    answers = _ask(_watch._store, some, time.sleep) if some and _watch is not None else {}
    return {rank: answer.get("where", "does not answer") for rank, answer in answers.items()}


def lost_peer(world: World, operation: str, error: RuntimeError) -> CollectiveError | None:
    """Translate an error of torch's own collectives.

    Returns None for an error that is not a lost connection.
    """
    first_line = str(error).partition("\n")[0]
    if _watch is None or world.store is None or not LOST.search(first_line):
        return None
    if not module_that_raised(error).startswith(WAITING):
        return None
    others = [rank for rank in range(world.size) if rank != world.rank]
    end_silent(world.store, FAILING_SECONDS)
    try:
        answers = _ask(_under(_watch.prefix, world.store), others, time.sleep)
    except RuntimeError:  # the store ended with rank 0, which served it, or its machine is silent
        answers = {0: {}}
    elsewhere = {rank: answer for rank, answer in answers.items() if answer.get("operation") != operation}
    return CollectiveError(
        f"{operation}: rank {world.rank} lost {_listed(elsewhere) or 'the others'}\n{first_line}\n"
        "look at what those ranks did: they died, hang, or took another branch",
        operation=operation,
    )


class _Assembly:
    """One `assemble`, as this rank sees it."""

    def __init__(self, run: Run, prefix: str, operation: str, brings: str, models: Sequence[str]) -> None:
        assert run.world.store is not None
        self.operation, self.brings = operation, f"{operation} of {brings}" if brings else operation
        self.models = models
        self.rank, self.ranks = run.world.rank, range(run.world.size)
        self.store, self.number = _under(prefix, run.world.store), next(_assemblies)
        self.key = f"assembly/{self.number}"
        self.timeout = timeout_of(run)

    def hold(self) -> None:
        """Come, wait for the verdict, and raise it unless it is empty."""
        self.store.set(f"{self.key}/{self.rank}", json.dumps([self.brings, *self.models]))
        came = self.store.add(f"{self.key}/came", 1)
        if came == len(self.ranks):
            self.store.set(f"{self.key}/verdict", self._compared())
            for name in ("came", "verdict"):  # of the assembly before, which all ranks have left
                self.store.delete_key(f"assembly/{self.number - 1}/{name}")
        verdict = self._verdict(is_first=came == 1)
        if verdict:
            raise CollectiveError(verdict, operation=self.brings)
        self.store.delete_key(f"{self.key}/{self.rank}")

    def _compared(self) -> str:
        """Compare what all ranks brought; "" if it is equal."""
        texts = self.store.multi_get([f"{self.key}/{rank}" for rank in self.ranks])
        brought = [tuple(json.loads(text)) for text in texts]
        ordered = {(words, *sorted(models)) for words, *models in brought}
        if len({words for words, *_ in brought}) == 1 and len(ordered) == len(set(brought)):
            return ""
        listed = "\n".join(f"  rank {rank}: {', '.join(words)}" for rank, words in enumerate(brought))
        remedy = "call it on all ranks alike, with models in one order"
        return f"{self.operation}: ranks passed different inputs\n{listed}\n{remedy}"

    def _verdict(self, *, is_first: bool) -> str:
        """Wait for the verdict.

        The first rank to come asks after absent ranks, and may decide.
        """
        key = f"{self.key}/verdict"
        begun = looked = told = time.monotonic()
        pause, longest = 0.001, 0.05 + len(self.ranks) / REQUESTS
        while not self.store.check([key]):  # torch's own wait logs each time-out
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
            now = time.monotonic()
            if now - looked < LOOK_SECONDS:
                continue
            looked, waited = now, now - begun
            if is_first:
                absent = self._absent()
                if waited > self.timeout:
                    self.store.set(key, self._failure(absent, "and timed out"))
                elif absent and all(answer.get("stuck") for answer in absent.values()):
                    self.store.set(key, self._failure(absent, "which will not come"))
                else:
                    self.store.add("asked", 1)
                    if now - told > TELL_SECONDS:
                        told, waiting = now, f"{self.operation} has waited {waited:.0f} s"
                        tell(f"accel: {waiting} for {_listed(absent)}\n")
            elif waited > self.timeout + LOOK_SECONDS:  # the first rank may be gone
                return self._failure(self._absent(), "and timed out")
        return self.store.get(key).decode()

    def _absent(self) -> dict[int, Mapping[str, Any]]:
        """Return the ranks that have not come, with the last answer of each."""
        absent = [rank for rank in self.ranks if not self.store.check([f"{self.key}/{rank}"])]
        return {rank: _answer_of(self.store, rank) for rank in absent}

    def _failure(self, absent: Mapping[int, Mapping[str, Any]], how: str) -> str:
        came = ", ".join(str(rank) for rank in self.ranks if rank not in absent)
        return (
            f"{self.operation} is collective: rank(s) {came} of {len(self.ranks)} waited for"
            f" {_listed(absent)}, {how}\ncall {self.operation} on all ranks, not on one alone"
        )


class Watch:
    """The thread, with its own connection to the store."""

    def __init__(
        self, store: Store, world: World, *, serves: bool, timeout: float, folder: Path | None
    ) -> None:
        self.users = 0
        self.calls: list[WeakMethod[Callable[[Store], None]]] = []
        self.prefix = f"watch/{next(_watches)}"
        self._store = _under(self.prefix, store)
        self._rank, self._size, self._serves = world.rank, world.size, serves
        self._main = threading.main_thread().ident
        self._ending = threading.Event()
        self._store_is_gone = False
        self._position: tuple[Any, ...] = ()
        self._since = self._cpu_seconds = self._told = 0.0
        self._heard = -1
        # Ranks that wait report before their collective's time-out, which unwinds the stack: a look may be
        # late at the beginning and at the end, and the report waits two for answers.
        self._timeout, self._patience = timeout, max(timeout - 8 * LOOK_SECONDS, timeout / 2)
        self._folder = folder
        self._stacks, self._is_reported = 0, False
        self._thread = threading.Thread(target=self._run, name="accel-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread, and tell ranks that ask that this one has ended.

        The rank that serves the store lets its clients leave first.

        torch writes a page of warnings for each client that looks into a store that is gone.
        """
        self._ending.set()
        self._thread.join(LOOK_SECONDS)
        with suppress(RuntimeError):
            if not self._store_is_gone:
                self._heard = sys.maxsize  # this answer holds for every question to come
                self._answer({"where": "has ended its run", "stuck": True})
                self._call()
                self._leave()
            deadline = time.monotonic() + 2 * LOOK_SECONDS
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
                self._call()
        except RuntimeError:  # the store is gone, and with it the ranks that could ask
            self._store_is_gone = True

    def _call(self) -> None:
        for reference in [*self.calls]:
            try:
                if (call := reference()) is not None:
                    call(self._store)
            except RuntimeError:  # the store's, which is gone
                raise
            except Exception as error:
                self.calls.remove(reference)
                tell(f"accel: the watch no longer calls {call}, which raised {error!r}\n")

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
        stuck = seen.waits_for_ranks and still >= STUCK_SECONDS
        state = {"where": seen.where, "operation": seen.operation, "stuck": stuck}
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
        elif seen.in_collective and still - self._told > TELL_SECONDS:
            self._told = still
            self._answer(state)
            # One rank speaks for all that stand in the same collective.
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
            still, others = time.monotonic() - self._since, [r for r in range(self._size) if r != self._rank]
            answers = _ask(self._store, others, self._ending.wait)
            away = {rank: answer for rank, answer in answers.items() if answer.get("where") != seen.where}
            if self._folder is not None:
                remove_stacks(self._folder, (rank for rank, answer in answers.items() if not answer))
            there = f"elsewhere: {_listed(away)}" if away else "all ranks are there"
            tell(
                f"accel: rank {self._rank} ({seen.where}) makes no progress for {still:.0f} s; {there};"
                f" stacks of all ranks: {self._folder if is_written else 'on the stderr of each'}\n"
            )

    def _speak(self, operation: str | None) -> None:
        """Name the ranks that are not in this rank's operation."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        answers = _ask(self._store, others, self._ending.wait)
        absent = {rank: answer for rank, answer in answers.items() if answer.get("operation") != operation}
        if absent:
            still, name = time.monotonic() - self._since, operation or "a collective"
            tell(f"accel: rank {self._rank} has waited {still:.0f} s in {name} for {_listed(absent)}\n")


def timeout_of(run: Run) -> float:
    """Return the seconds that a collective of the run may wait."""
    from torch.distributed.distributed_c10d import default_pg_timeout

    return (run.config.process_group.timeout or default_pg_timeout).total_seconds()


def _under(prefix: str, store: Store) -> Store:
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


def _ask(store: Store, ranks: Iterable[int], wait: Callable[[float], object]) -> dict[int, Mapping[str, Any]]:
    """Ask ranks where they are; {} for a rank that does not answer within two looks."""
    asked = store.add("asked", 1)
    wait(2 * LOOK_SECONDS)
    answers = {rank: _answer_of(store, rank) for rank in ranks}
    return {rank: answer if answer.get("asked", -1) >= asked else {} for rank, answer in answers.items()}


def _answer_of(store: Store, rank: int) -> Mapping[str, Any]:
    """Return the last answer of a rank; {} if it never answered."""
    key = f"where/{rank}"
    answer: Mapping[str, Any] = json.loads(store.get(key)) if store.check([key]) else {}
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
    """The name of the operation of ours that the thread is in."""
    waits: bool
    """True if it is in code that waits for ranks or devices, ours or torch's."""
    waits_for_ranks: bool
    """True if only other ranks can let the thread go on.

    Not a disk, a terminal, or a loader's workers.
    """
    in_collective: bool


def _seen(thread: int | None) -> _Seen:
    frames = []
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    where, operation = _place(frames)
    in_collective = any(_module(frame) == COLLECTIVES for frame in frames)
    inside_torch = bool(frames) and _module(frames[0]).startswith(WAITING)
    return _Seen(
        position=tuple((id(frame.f_code), frame.f_lasti) for frame in frames),
        where=where,
        operation=operation,
        waits=in_collective or inside_torch,
        waits_for_ranks=operation is not None and (in_collective or inside_torch),
        in_collective=in_collective,
    )


def _place(frames: Sequence[FrameType]) -> tuple[str, str | None]:
    """Return a thread's place in words, and its operation of ours.

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
