"""From a folder being written to a checkpoint, in one step that is either done or not.

A save is written beside its target as `.NAME.SAVE_ID.partial` and takes the target's name last. A
kill at any instant leaves the old checkpoint, or the new one; what else is left lies under such a
name, which tells whose it is. Only what nobody writes any more is removed. One rank calls these,
the others wait.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import secrets
import shutil
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_64_hexdigest

from accel_core.checkpoint.files import is_ours, manifest_if_any, sync_folder
from accel_core.errors import CheckpointError

__all__ = ["begin", "clean", "holders", "locate", "new_save_id", "partial_folder", "publish"]

logger = logging.getLogger(__name__)

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
    try:
        partial_folder(target, save_id).mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"{target.parent} is one folder for several nodes, though project.save_on_each_node says that"
            " each has a disk of its own\nset project.save_on_each_node to false",
            path=str(target),
        ) from None


def publish(target: Path, save_id: str, *, replace: bool) -> None:
    """Give the complete, synced folder the name of the target. What had it before is left to `clean`.

    Raises:
        CheckpointError: there is a checkpoint of that name, and it is not to be replaced.
    """
    partial = partial_folder(target, save_id)
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
        target.rename(partial.with_suffix(".replaced"))
        partial.rename(target)
    sync_folder(target.parent)


def locate(target: Path) -> Path:
    """The folder that holds the checkpoint `target`: itself, but for a kill between two renames."""
    replaced = [
        left for left, found in _leftovers(target.parent) if found.group(1, 3) == (target.name, "replaced")
    ]
    return next(filter(is_ours, sorted(replaced)), target) if not target.exists() else target


def holders(target: Path) -> dict[str, Path]:
    """Save id -> folder, of all that is complete and has been, or is to be, the checkpoint `target`."""
    left = sorted(left for left, found in _leftovers(target.parent) if found[1] == target.name)
    return {found.save_id: path for path in [*left, target] if (found := manifest_if_any(path))}


def clean(parent: Path, save_id: str, *, fence: bool, all_is_committed: bool) -> None:
    """Remove what saves left in `parent`; a checkpoint among it gets its name back.

    `fence`: no other living run has this run's id. What another process of this run is still writing,
    a late writer of an earlier incarnation, is then removed too: its rename will fail.
    `all_is_committed`: no other disk may need what is complete here. What fails is logged.
    """
    for left, found in _leftovers(parent):
        if not _is_over(found[2], save_id, fence=fence) or not (all_is_committed or not is_ours(left)):
            continue
        target = parent / found[1]
        try:
            if found[3] == "replaced" and not target.exists():
                left.rename(target)
            else:
                shutil.rmtree(left)
        except OSError as error:
            logger.warning("%s, left by a save that has ended, could not be removed: %s", left, error)


def _leftovers(parent: Path) -> list[tuple[Path, re.Match[str]]]:
    entries = parent.iterdir() if parent.is_dir() else ()
    named = [(path, found) for path in entries if (found := _LEFTOVER.fullmatch(path.name))]
    return [(path, found) for path, found in named if not path.is_symlink()]


def _is_over(found: str, save_id: str, *, fence: bool) -> bool:
    """Whether the save `found` is at an end, as far as one who makes the save `save_id` can know.

    Two runs resumed from one checkpoint have one run id: it alone says nothing about the other's life.
    """
    run, *place, _ = found.split("-")
    this_run, *here, _ = save_id.split("-")
    if place == here or (fence and run == this_run):
        return run == this_run
    return place[0] == _machine() and _has_ended(int(place[1]))


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
