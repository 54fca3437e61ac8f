"""Agree on a port of node 0 by its address and the name of the job.

    node 0                                         each other node
    ------                                         ---------------
    take a port that is free                       go through the doors of this job's name, until one
    listen at the first door that is free          answers with that name; take the port it says
    tell each caller the job's name and the port

Doors are ports that follow from the name, below those that systems hand out by themselves. Several jobs of
one machine may have doors in common: the name tells them apart.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Final

from accel_core.distributed.progress import show_progress
from accel_core.errors import LaunchError

PORTS: Final = range(20_000, 32_000)
DOORS: Final = 8
ANSWER_SECONDS: Final = 2.0
ANSWER_LETTERS: Final = 1000
PAUSE_SECONDS: Final = 0.1
FIRST_NOTICE: Final = 3.0
"""Seconds to the first line of a log that says which nodes are waited for."""


def agree_on_port(host: str, name: str, seconds: float, *, serves: bool) -> int:
    """Return a port of `host` that was free, the same on all nodes of the job `name`.

    serves: this is node 0.

    Raises:
        LaunchError: node 0 did not answer for `seconds`.
    """
    doors = random.Random(name).sample(PORTS, DOORS)  # noqa: S311  all nodes draw the same
    if serves:
        port = _bound(random.SystemRandom().sample(PORTS, 100))
        number: int = port.getsockname()[1]
        listening = _bound(doors)
        listening.listen(128)
        port.close()
        threading.Thread(target=_answer, args=(listening, f"{name} {number}\n"), daemon=True).start()
        return number
    deadline = time.monotonic() + seconds
    with told_soon(f"this node waits for node 0 of {name} at {host}"):
        while time.monotonic() < deadline:
            for door in doors:
                if (told := _port_told(host, door, name)) is not None:
                    return told
            time.sleep(PAUSE_SECONDS)
    raise LaunchError(
        f"node 0 of {name} did not answer at {host} for {seconds:.0f} s\n"
        f"check that it has started, and that its ports {PORTS.start} to {PORTS.stop} can be reached; or name"
        " another address with --rendezvous HOST:PORT"
    )


def told_soon(text: str | Callable[[], str]) -> AbstractContextManager[None]:
    """Show that a node waits for others, in a log too from the third second on."""
    return show_progress(text, main_process_only=False, tell_after=FIRST_NOTICE)


def _port_told(host: str, door: int, name: str) -> int | None:
    """Return the port that node 0 tells at a door; None if it is not there."""
    with suppress(OSError), socket.create_connection((host, door), ANSWER_SECONDS) as caller:
        # It may be another service.
        answer = caller.makefile(errors="replace").readline(ANSWER_LETTERS)
        said, _, told = answer.rstrip("\n").rpartition(" ")
        if said == name and told.isdecimal():
            return int(told)
    return None


def _bound(numbers: list[int]) -> socket.socket:
    for number in numbers:
        bound = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        with suppress(OSError):
            if bound.family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind(("", number))
            return bound
        bound.close()
    listed = ", ".join(map(str, sorted(numbers)[:DOORS]))
    raise LaunchError(
        f"ports {listed} of this machine are all in use\nname another port with --rendezvous HOST:PORT"
    )


def _answer(door: socket.socket, line: str) -> None:
    while True:
        with suppress(OSError):
            caller, _ = door.accept()
            with caller:
                caller.sendall(line.encode())
