"""From a folder being written to a checkpoint, in one step that is either done or not.

A save is written beside its target as `.NAME.SAVE_ID.partial` and takes the target's name last. A
kill at any instant leaves the old checkpoint, or the new one; what else is left lies under such a
name, which tells whose it is. Only what nobody writes any more is removed. One rank calls these,
the others wait.
"""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import re
import secrets
import shutil
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_64_hexdigest

from accel_core.checkpoint.files import is_ours, sync_folder
from accel_core.errors import CheckpointError

__all__ = ["begin", "clean", "locate", "new_save_id", "partial_folder", "publish"]

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_LEFTOVER: Final = re.compile(
    r"\.(.+)\.([0-9a-f]{16}-[0-9a-f]{8}-\d+-[0-9a-f]{8})\.(partial|replaced|removed)"
)


def new_save_id(run_id: str) -> str:
    """An id for one save: digests of the run's id and of this machine, the process, and chance."""
    run = xxh3_64_hexdigest(run_id.encode("utf-8", "surrogateescape"))
    return f"{run}-{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"


def partial_folder(target: Path, save_id: str) -> Path:
    """Where a save is written."""
    return target.parent / f".{target.name}.{save_id}.partial"


def begin(target: Path, save_id: str) -> None:
    """Make the folder to write into.

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
    partial_folder(target, save_id).mkdir()


def publish(target: Path, save_id: str, *, replace: bool) -> None:
    """Give the complete, synced folder the name of the target. What had it before is removed.

    Raises:
        CheckpointError: there is a checkpoint of that name, and it is not to be replaced.
    """
    partial = old = partial_folder(target, save_id)
    sync_folder(partial)
    if not is_ours(target):
        if target.exists():  # an empty folder; not every system renames over one
            target.rmdir()
        partial.rename(target)
    elif not replace:
        raise CheckpointError(
            f"{target} has appeared while this save was written: another run saves into {target.parent}\n"
            "both keep what they have; give each run a project_dir of its own",
            path=str(target),
        )
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


def clean(parent: Path, save_id: str, *, fence: bool) -> None:
    """Remove what killed saves left in `parent`; a checkpoint among it gets its name back.

    `fence`: no other living run has this run's id. What another process of this run is still writing,
    a late writer of an earlier incarnation, is then removed too: its rename will fail.
    """
    for left in parent.iterdir() if parent.is_dir() else ():
        found = _LEFTOVER.fullmatch(left.name)
        if found is None or left.is_symlink() or not _is_over(found[2], save_id, fence=fence):
            continue
        target = parent / found[1]
        if found[3] == "replaced" and not target.exists():
            left.rename(target)
        else:
            shutil.rmtree(left)


def _is_over(found: str, save_id: str, *, fence: bool) -> bool:
    """Whether the save `found` is at an end, as far as one who makes the save `save_id` can know.

    Two runs resumed from one checkpoint have one run id: it alone says nothing about the other's life.
    """
    run, *place, _ = found.split("-")
    this_run, *here, _ = save_id.split("-")
    if place == here or (fence and run == this_run):
        return run == this_run
    return place[0] == here[0] and _has_ended(int(place[1]))


def _machine() -> str:
    """Where a process number means the same process: a machine, and what of it a container sees."""
    space = Path("/proc/self/ns/pid")
    name = f"{platform.node()}/{space.stat().st_ino if space.exists() else 0}"
    return xxh3_64_hexdigest(name.encode())[:8]


def _has_ended(process: int) -> bool:
    if os.name == "nt":  # asking there would end it
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's, and alive
        return False
    return False


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    try:
        renameat2: Any = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
