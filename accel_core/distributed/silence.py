"""End waits for a store whose machine is silent.

A request to the store of a machine that is cut off lasts as long as the network stack tries: 15 minutes.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Container

    from torch.distributed.distributed_c10d import Store

FAILING_SECONDS: Final = 5.0
"""Time for the store to answer a rank that fails, and asks where the others are."""
LONGEST_SECONDS: Final = 2_000_000.0
LONGEST_PAUSE: Final = 32_767
"""The largest numbers of seconds that Linux takes here."""


def end_silent(store: Store, seconds: float) -> None:
    """Have requests to a store fail when its machine is silent for so long.

    Those of this process raise RuntimeError then. Connections that are made later are not changed, and none
    outside of Linux.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    if port is None or sys.platform != "linux":  # a store in files, or in this process
        return
    peers = {(address, port) for address in _addresses(store.host)}  # type: ignore[attr-defined]
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the file is closed meanwhile, or is no connection
            number = int(entry.name)
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                _limit(number, peers, seconds)


@cache
def _addresses(host: str) -> frozenset[str]:
    """Return the addresses of a host.

    They are looked up once, after the store has been reached: no name server may answer when a link is cut.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return frozenset(_plain(address[0]) for *_, address in found)


def _plain(address: object) -> str:
    return str(address).removeprefix("::ffff:")  # torch reaches addresses of version 4 as of version 6


def _limit(number: int, peers: Container[tuple[str, int]], seconds: float) -> None:
    seconds = min(seconds, LONGEST_SECONDS)
    blocks = os.get_blocking(number)
    with socket.socket(fileno=os.dup(number)) as connection:
        os.set_blocking(number, blocks)  # as it was, whatever socket.setdefaulttimeout says
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        address, port = connection.getpeername()[:2]
        if (_plain(address), port) not in peers:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
        # Ask, where a request is not on its way but waits for its answer.
        pause = min(max(1, int(seconds / 3)), LONGEST_PAUSE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
