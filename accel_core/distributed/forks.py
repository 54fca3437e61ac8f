"""Children that this process forks, such as a loader's workers and those of a notebook."""

from __future__ import annotations

import gc
import os
from functools import cache
from typing import Final

_collects: Final[list[bool]] = []
"""True for each fork under way that began while garbage was collected, False for others."""


@cache
def keep_inherited_objects() -> None:
    """Have children that are forked from now on leave all objects that they inherit alone.

    A child that collects a process group of an ended run waits for the group's threads, which are in the
    parent alone, or crashes. In the parent nothing is frozen: it collects as before.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_stop, after_in_parent=_go_on, after_in_child=_freeze)


def _stop() -> None:
    # Else the child may collect in functions of others that run after a fork, before `_freeze`.
    _collects.append(gc.isenabled())
    gc.disable()


def _go_on() -> None:
    # If several threads fork at once, the last of them takes the entry of the first.
    if _collects and _collects.pop():
        gc.enable()


def _freeze() -> None:
    gc.freeze()
    if any(_collects):
        gc.enable()
    _collects.clear()
