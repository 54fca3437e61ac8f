"""Protect forked children, such as workers of a loader or a notebook, from inherited process groups."""

from __future__ import annotations

import gc
import os
from functools import cache
from typing import Final

_collects: Final[list[bool]] = []
"""For each fork under way: whether the garbage collector was enabled when the fork began."""


@cache
def keep_inherited_objects() -> None:
    """Exclude inherited objects from garbage collection in children that are forked from now on.

    A child that collects a process group of an ended run waits for the group's threads, which only the
    parent has, or crashes. The parent collects as before.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_stop, after_in_parent=_go_on, after_in_child=_freeze)


def _stop() -> None:
    # The child may run other libraries' fork handlers before `_freeze`: they must not collect either.
    _collects.append(gc.isenabled())
    gc.disable()


def _go_on() -> None:
    # If several threads fork at once, the last thread takes the entry of the first.
    if _collects and _collects.pop():
        gc.enable()


def _freeze() -> None:
    gc.freeze()
    if any(_collects):
        gc.enable()
    _collects.clear()
