"""Makes each attempt of this process to reach another machine fail, and notes it in a file."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

LOCAL = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()}


def stand(notes: Path) -> None:
    """From now on: names are not looked up, and only this machine's own addresses are connected to."""

    def watch(event, arguments):
        if event == "socket.getaddrinfo":
            host = arguments[0]
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            host = arguments[1][0]
        else:
            return
        if (host.decode() if isinstance(host, bytes) else host) not in LOCAL:
            with notes.open("a", encoding="utf-8") as file:
                file.write(f"{event} {arguments[:2]}\n")
            raise OSError(f"no network here: {event} {arguments[:2]}")

    sys.addaudithook(watch)


if "ACCEL_TEST_NETWORK_NOTES" in os.environ:
    stand(Path(os.environ["ACCEL_TEST_NETWORK_NOTES"]))
