"""Requests to a store whose machine is silent end: tests/launch/test_hosts.py cuts real links."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from accel_core.distributed.silence import end_silent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")


def limits(port: int) -> list[tuple[int, bool]]:
    """Milliseconds of each connection of this process to a port, and if it blocks."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                found.append((limit, os.get_blocking(int(entry.name))))
    return found


def test_each_connection_to_the_store_is_given_the_time_and_others_are_left():
    store = TCPStore("127.0.0.1", 0, is_master=True)
    other = TCPStore("127.0.0.1", 0, is_master=True)
    clone = store.clone()

    end_silent(PrefixStore("a", PrefixStore("b", store)), 7)

    assert limits(store.port) == [(7000, True)] * 2
    assert limits(other.port) == [(0, True)]
    clone.set("key", "text")
    assert store.get("key") == b"text"


def test_a_connection_to_the_same_port_of_another_machine_is_left():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("localhost", port, is_master=True, master_listen_fd=listener.detach())
    server = socket.create_server(("127.0.0.2", port))
    with server, socket.create_connection(("127.0.0.2", port)) as other:
        end_silent(store, 7)

        assert other.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
        assert sorted(limits(store.port)) == [(0, True), (7000, True)]


def test_a_store_that_was_reached_as_ipv6_is_given_the_time():
    store = TCPStore("::ffff:127.0.0.1", 0, is_master=True)

    end_silent(store, 7)

    assert limits(store.port) == [(7000, True)]


def test_a_default_time_out_of_sockets_does_not_reach_those_of_the_store():
    store = TCPStore("127.0.0.1", 0, is_master=True)
    socket.setdefaulttimeout(3)
    try:
        end_silent(store, 7)
    finally:
        socket.setdefaulttimeout(None)

    assert limits(store.port) == [(7000, True)]


def test_a_time_out_of_years_is_taken():
    store = TCPStore("127.0.0.1", 0, is_master=True)

    end_silent(store, 3e8)

    assert limits(store.port) == [(2_000_000_000, True)]
