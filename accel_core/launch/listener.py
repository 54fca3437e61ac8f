"""Hear what other nodes of an attempt announce, and whether they are there.

each node, from the meeting on                 node 0, which serves the store
------------------------------                 ------------------------------
set host/NODE = the name of its machine        a failure is announced: see for LOST_SECONDS which
add 1 to beats/NODE every BEAT_SECONDS         beats stand still, and set lost/ATTEMPT to their nodes
a node that failed: wait for lost/ATTEMPT
"""

from __future__ import annotations

import platform
import threading
import time
from contextlib import suppress
from typing import Any, Final

STOPPED: Final = "accel/stopped"
"""The key under which a node that a signal stopped announces it."""
POLL_SECONDS: Final = 0.1
BEAT_SECONDS: Final = 0.5
LOST_SECONDS: Final = 6.0
"""Time without a beat after which a node counts as lost."""
END_SECONDS: Final = 1.0


class Listener:
    """Thread that reads the announcements of one attempt.

    The loop that watches the workers must not wait for it.

    A read from the store of a machine that is cut off lasts as long as the network stack waits: 15 minutes.
    """

    def __init__(self, store: Any, attempt: str, node: int, nodes: int) -> None:
        self.attempt = attempt
        self.heard: tuple[str, str] | None = None
        self._first_host = "node 0"
        self._node, self._nodes = node, nodes
        self._over = False
        self._verdict: str | None = None
        self._thread = threading.Thread(target=self._listen, args=(store.clone(),), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread.

        A thread inside torch's store aborts a process that exits.
        """
        self._over = True
        self._thread.join(END_SECONDS)

    def lost_nodes(self) -> str:
        """Return the nodes that do not answer, in words; "" if all do.

        A failure has been announced.
        """
        deadline = time.monotonic() + LOST_SECONDS + 2 * END_SECONDS
        while self._verdict is None and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return f"{self._first_host} does not answer" if self._verdict is None else self._verdict

    def _listen(self, store: Any) -> None:
        with suppress(RuntimeError):  # node 0 has finished, or is gone
            store.set(_host(self._node), f"node {self._node} ({platform.node()})")
            self._first_host = store.get(_host(0)).decode()
            beaten = 0.0
            while not self._over:
                if time.monotonic() > beaten + BEAT_SECONDS:
                    beaten = time.monotonic()
                    store.add(_beats(self._node), 1)
                if self.heard is None:
                    key = next((key for key in (STOPPED, self.attempt) if store.check([key])), None)
                    if key is not None:
                        self.heard = key, store.get(key).decode()
                elif self._verdict is None:
                    self._agree(store)
                time.sleep(POLL_SECONDS)

    def _agree(self, store: Any) -> None:
        """Read which nodes are lost; node 0 finds it out."""
        key = f"accel/lost/{self.attempt}"
        if store.check([STOPPED]):  # a node that was stopped is not lost
            self._verdict = ""
        elif self._node == 0:
            self._verdict = self._silent(store)
            store.set(key, self._verdict)
        elif store.check([key]):
            self._verdict = store.get(key).decode()

    def _silent(self, store: Any) -> str:
        before = {node: store.add(_beats(node), 0) for node in range(1, self._nodes)}
        silent, deadline = list(before), time.monotonic() + LOST_SECONDS
        while silent and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            silent = [node for node in silent if store.add(_beats(node), 0) == before[node]]
        named = [store.get(_host(node)).decode() for node in silent if store.check([_host(node)])]
        shown = ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
        return f"{shown} {'do' if len(named) > 1 else 'does'} not answer" if named else ""


def _host(node: int) -> str:
    return f"accel/host/{node}"


def _beats(node: int) -> str:
    return f"accel/beats/{node}"
