"""From a folder being written to a checkpoint, in one step that is either done or not.

A save is written beside its target as `.NAME.SAVE_ID.partial` and takes the target's name last. A
kill at any instant leaves the old checkpoint, or the new one; what else is left lies under such a
name, and the next save of the same run removes it. One rank calls these, the others wait.
"""

from __future__ import annotations

import ctypes
import glob
import os
import secrets
import shutil
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_64_hexdigest

from accel_core.checkpoint.files import is_ours, sync_folder
from accel_core.errors import CheckpointError

__all__ = ["begin", "locate", "new_save_id", "partial_folder", "publish"]

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def new_save_id(run_id: str) -> str:
    """An id for one save. It starts with a digest of the run's id, by which leftovers are recognised."""
    return f"{xxh3_64_hexdigest(run_id.encode('utf-8', 'surrogateescape'))}-{secrets.token_hex(6)}"


def partial_folder(target: Path, save_id: str) -> Path:
    """Where a save is written."""
    return target.parent / f".{target.name}.{save_id}.partial"


def begin(target: Path, save_id: str) -> None:
    """Make the folder to write into, after removing what killed saves of this run left behind.

    That also fences a late writer of an earlier incarnation: its folder is gone, its rename fails.

    Raises:
        CheckpointError: the target exists and is not a checkpoint.
    """
    if target.exists() and not is_ours(target) and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(
            f"{target} exists and is not a checkpoint; it was left as it is\n"
            "save to another folder, or move this one away",
            path=str(target),
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    _clean(target.parent, save_id.partition("-")[0])
    partial_folder(target, save_id).mkdir()


def publish(target: Path, save_id: str) -> None:
    """Give the complete, synced folder the name of the target. What had it before is removed."""
    partial = old = partial_folder(target, save_id)
    sync_folder(partial)
    if not is_ours(target):
        if target.exists():  # an empty folder; not every system renames over one
            target.rmdir()
        partial.rename(target)
    elif not _exchange(partial, target):  # two renames; `locate` finds the old one if we die between them
        old = partial.with_suffix(".replaced")
        target.rename(old)
        partial.rename(target)
    sync_folder(target.parent)
    # The new checkpoint is there, whatever happens to the old one; the next save tries again.
    shutil.rmtree(old, ignore_errors=True)


def locate(target: Path) -> Path:
    """The folder that holds the checkpoint `target`: itself, but for a kill between two renames."""
    replaced = sorted(target.parent.glob(f".{glob.escape(target.name)}.*.replaced"))
    return next(filter(is_ours, replaced), target) if not target.exists() else target


def _clean(parent: Path, run_digest: str) -> None:
    for left in parent.glob(f".*.{run_digest}-*.*"):
        target = parent / left.name[1:].rpartition(f".{run_digest}-")[0]
        if left.suffix == ".replaced" and not target.exists():
            left.rename(target)
        elif left.suffix in (".partial", ".replaced"):
            shutil.rmtree(left)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    try:
        renameat2: Any = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
