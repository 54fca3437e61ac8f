"""A process ends when its other threads have come to rest, not in the middle of what they do."""

from __future__ import annotations

import sys
import threading
import time

import pytest

pytest.importorskip("torch")

from accel_core.distributed import threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what threads do")


def test_a_thread_that_has_something_left_to_do_is_waited_for(monkeypatch):
    monkeypatch.setattr(threads, "FINISH_SECONDS", 20)
    until = time.monotonic() + 0.05

    def spin():
        while time.monotonic() < until:
            pass

    worker = threading.Thread(target=spin)
    worker.start()
    threads.let_threads_finish()

    assert not worker.is_alive()


def test_a_thread_that_never_rests_is_left_alone(monkeypatch):
    monkeypatch.setattr(threads, "FINISH_SECONDS", 0.05)
    rest = threading.Event()

    def spin():
        while not rest.is_set():
            pass

    worker = threading.Thread(target=spin)
    worker.start()
    threads.let_threads_finish()
    alive = worker.is_alive()
    rest.set()
    worker.join()

    assert alive
