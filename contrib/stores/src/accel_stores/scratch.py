"""Folders of this user on this machine, for files on their way to and from stores.

Each is claimed by the processes that use it, as folders of a disk are, and removed by the last of them; what
a killed process left goes when the next folder is made.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accel_core import Disk

__all__ = ["is_used", "scratch_folder", "scratch_root"]


def scratch_root() -> Path:
    """Return the folder of all, which is this user's alone.

    Raises:
        OSError: it cannot be made, or is another user's.
    """
    root = Path(tempfile.gettempdir(), f"accel-{os.getuid()}")
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        if root.is_symlink() or root.stat().st_uid != os.getuid():
            raise PermissionError(f"{root} is not this user's")
        root.chmod(0o700)  # what an earlier program or a user's umask left open to others
    except OSError as error:
        text = f"{root}, for files on their way to and from a store, cannot be used: {error}; set TMPDIR"
        raise OSError(text) from error
    return root


@contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """Give a folder of this name, common to all processes of this machine that ask for it."""
    root, claim = scratch_root(), ExitStack()
    with _alone(root):
        _remove_unused(root)
        claim.enter_context(Disk(root / name).claim())
    try:
        yield root / name
    finally:
        with _alone(root):
            claim.close()
            _remove_unused(root)


def is_used(name: str) -> bool:
    """Return True if a process of this machine may be using the folder of this name."""
    return Disk(scratch_root() / name).is_claimed()


def _remove_unused(root: Path) -> None:
    for name, size in Disk(root).list().items():
        if size is None and not is_used(name):
            shutil.rmtree(root / name, ignore_errors=True)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the other processes of this machine that make or remove a folder."""
    with (root / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked process has it too
