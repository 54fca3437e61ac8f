"""Ctrl-C, put off."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Answer Ctrl-C at the end of this context.

    Other threads than the main one get none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[Any, ...]] = []
    before = signal.signal(signal.SIGINT, lambda *told: caught.append(told))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught and callable(before):
            before(*caught[-1])
