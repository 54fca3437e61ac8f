"""A progress bar: on the main process, and only on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
import threading

import pytest

from accel_core import progress
from accel_testing import run_processes


def test_off_a_terminal_it_is_the_thing_itself(capsys):
    items = [1, 2]

    assert progress(items, "training") is items
    assert capsys.readouterr() == ("", "")


def everything_written_to(reader, into):
    with contextlib.suppress(OSError):  # EIO: the other end is closed, and all was read
        while piece := os.read(reader, 65536):
            into += piece


def draw():
    reader, writer = pty.openpty()
    shown = bytearray()
    watching = threading.Thread(target=everything_written_to, args=(reader, shown))
    watching.start()
    with os.fdopen(writer, "w") as sys.stderr:
        items = progress(iter("abc"), "training", total=3)
        untouched = type(items).__name__ == "list_iterator" or not hasattr(items, "gi_frame")
        seen = list(items)
    watching.join()
    assert untouched is (not shown)
    return seen, b"training" in shown, b"100%" in shown


@pytest.mark.skipif(sys.platform != "linux", reason="reads a pseudo terminal as Linux has it")
def test_on_a_terminal_the_main_process_shows_one():
    assert run_processes(draw) == [(["a", "b", "c"], True, True), (["a", "b", "c"], False, False)]
