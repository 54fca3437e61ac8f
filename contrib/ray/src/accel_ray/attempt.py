"""One attempt of a job: an actor on each node, its output, end and loss."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

import ray
from attrs import define, field, frozen
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from accel_core import LaunchError
from accel_ray.loss import POLL_SECONDS, VERDICT_SECONDS, Head, HeadLost, silent
from accel_ray.node import Node

__all__ = ["Attempt", "NodeLost"]

ENDING_SECONDS: Final = 35
"""Time for nodes to end after a signal; torch's agent takes up to 30."""
FAILING_SECONDS: Final = 5
"""Time for the other nodes to hear of a failure by themselves."""
STOPS: Final = ("SIGINT", "SIGTERM", "SIGHUP")
WARNING: Final = "SIGUSR1"

_writing = threading.Lock()


class NodeLost(Exception):  # noqa: N818  not an error, if the job starts again
    """A node of the job is gone, or its actor is."""


class _Stopped(BaseException):
    """A signal has come."""

    def __init__(self, number: int) -> None:
        self.number = number


@frozen
class _End:
    """The end of a node's command: its exit code, or why it is not known."""

    node: int
    code: int | None
    reason: str = ""


@define
class Attempt:
    """The actors of one attempt."""

    actors: list[Any]
    names: list[str]
    """Host name and address of each node."""
    addresses: list[str]
    ends: queue.SimpleQueue[_End] = field(factory=queue.SimpleQueue)
    running: set[int] = field(factory=set)

    @classmethod
    @contextmanager
    def on(cls, group: Any, each: Mapping[str, int]) -> Iterator[Attempt]:
        """Start an actor on each node of a placement group, and end them.

        Raises:
            LaunchError: an actor does not start.
        """
        actors: list[Any] = []
        remote: Any = ray.remote(Node)
        try:
            for index in range(group.bundle_count):
                place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                options = {
                    "num_cpus": each["CPU"],
                    "num_gpus": each.get("GPU", 0),
                    "scheduling_strategy": place,
                    "max_concurrency": 4,  # signals reach it while it runs
                }
                actors.append(remote.options(**options).remote())
            try:
                found = ray.get([actor.address.remote() for actor in actors])
            except ray.exceptions.RayError as error:
                raise LaunchError(
                    f"an actor of the job did not start: {_reason(error)}\n"
                    "each node needs accel-ray and the same versions of Python and Ray as this one"
                ) from error
            addresses = [address for address, _ in found]
            yield cls(actors, [f"{host}, {address}" for address, host in found], addresses)
        except HeadLost:  # they end with Ray's processes on their nodes
            actors.clear()
            raise
        finally:
            for actor in actors:
                with suppress(Exception):  # it or the cluster may be gone
                    ray.kill(actor)

    def run(self, words: Sequence[str], variables: Sequence[Mapping[str, str]], folder: str | None) -> int:
        """Run a command on each node, and return the first exit code that is not 0.

        Signals to this process go to the commands.

        Raises:
            NodeLost: a node is gone.
            HeadLost: the head is.
        """
        head = Head.of_cluster()
        with self._signals():
            self.running = set(range(len(self.actors)))
            for node, (actor, mine) in enumerate(zip(self.actors, variables, strict=True)):
                lines = actor.run.options(num_returns="streaming").remote(words, mine, folder)
                threading.Thread(target=self._follow, args=(node, lines), daemon=True).start()
            try:
                code = 0
                while self.running and not code:
                    with suppress(queue.Empty):
                        code = self._next_end(POLL_SECONDS)
                    head.require()
                if code:  # others hear of it by themselves, or are told
                    self._look_for_lost()
                    self._stop(signal.SIGTERM)
            except HeadLost:
                self._stop(signal.SIGTERM, head.ending_seconds)  # actors hear it without the head
                raise
            except _Stopped as stopped:
                with suppress(_Stopped):  # a second signal ends it at once
                    self._stop(stopped.number)
                return 128 + stopped.number
        return code

    def _next_end(self, seconds: float) -> int:
        """Wait for a node to end, and return its code. Raises queue.Empty."""
        end = self.ends.get(timeout=seconds)
        self.running.discard(end.node)
        if end.code is None:
            raise NodeLost(f"node {end.node} of the job ({self.names[end.node]}) was lost: {end.reason}")
        return end.code

    def _look_for_lost(self) -> None:
        """Raise NodeLost if a node is lost.

        Ranks that miss those of the node fail before Ray knows.
        """
        with suppress(queue.Empty):
            self._wait(FAILING_SECONDS)
        lost = silent({node: self.actors[node] for node in self.running})
        if lost:
            name = self.names[lost[0]]
            sys.stderr.write(f"accel: node {lost[0]} of the job ({name}) does not answer\n")
            with suppress(queue.Empty):
                self._wait(VERDICT_SECONDS)
            if lost[0] in self.running:
                raise NodeLost(f"node {lost[0]} of the job ({name}) was lost: it does not answer")

    def _wait(self, seconds: float) -> None:
        """Wait for all nodes to end. Raises queue.Empty if some have not."""
        deadline = time.monotonic() + seconds
        while self.running:
            self._next_end(max(0.0, deadline - time.monotonic()))

    def _stop(self, number: int, seconds: float = ENDING_SECONDS) -> None:
        """Have the commands end, and wait for it."""
        self._send(number)
        with suppress(queue.Empty, NodeLost):
            self._wait(seconds)

    def _send(self, number: int) -> None:
        for node in self.running:
            self.actors[node].send.remote(number)

    def _follow(self, node: int, lines: Any) -> None:
        """Write a node's output, and put its end into the queue."""
        code: int | None = None
        try:
            for reference in lines:
                got = ray.get(reference)
                if isinstance(got, int):
                    code = 128 - got if got < 0 else got
                else:
                    _write(got)
        except Exception as error:  # of Ray: the actor or the node is gone
            self.ends.put(_End(node, None, _reason(error)))
        else:
            self.ends.put(_End(node, code))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Raise _Stopped for signals that stop, and pass on warnings."""

        def stop(number: int, _: FrameType | None) -> None:
            raise _Stopped(number)

        def warn(number: int, _: FrameType | None) -> None:
            self._send(number)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: stop for number in signal.Signals if number.name in STOPS}
        handlers |= {number: warn for number in signal.Signals if number.name == WARNING}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _write(lines: Sequence[tuple[str, bytes]]) -> None:
    with _writing:
        for name, text in lines:
            stream = getattr(sys, name).buffer
            stream.write(text)
            stream.flush()


def _reason(error: BaseException) -> str:
    """Return the lines of Ray's message that tell why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if "Error" in line or "died" in line), "")
    return told or (lines[0] if lines else type(error).__name__)
