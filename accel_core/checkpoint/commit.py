"""From a folder being written to a checkpoint, in one step that is either done or not.

A save is written beside its target as `.NAME.SAVE_ID.partial` and takes the target's name last. A
kill at any instant leaves the old checkpoint, or the new one; what else is left lies under such a
name, which tells what process made it. Only what a dead process left is removed, and nothing that no
save wrote. One rank of each disk calls these, the others wait.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_64_hexdigest

from accel_core.checkpoint.files import is_ours, manifest_if_any, read_manifest, sync_folder
from accel_core.errors import CheckpointError

__all__ = [
    "begin",
    "carry_back",
    "clean",
    "discard",
    "finish",
    "holders",
    "is_over",
    "leftovers",
    "locate",
    "new_save_id",
    "partial_folder",
    "publish",
    "replaced",
    "workshop",
]

logger = logging.getLogger(__name__)

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_SAVE_ID: Final = r"[0-9a-f]{16}-[0-9a-f]{8}-\d+-\d+-[0-9a-f]{8}"
_LEFTOVER: Final = re.compile(rf"\.(.+)\.({_SAVE_ID})\.(partial|replaced|removed)")
_WORKSHOP: Final = re.compile(rf"\.{_SAVE_ID}\.(weights|removed)")
_OURS: Final = re.compile(r"manifest\.json|state\.json|rank-\d{5,}\.(json|safetensors)|\.nfs[0-9a-f]+")
"""The files of a checkpoint, and what NFS makes of an open one that is removed. The rest is the user's."""
_UNKNOWN: Final = "0"
_live: Final[set[str]] = set()
"""The saves that this process has begun and not finished."""
_told: Final[set[Path]] = set()
"""The leftovers of which the log has said that they stay."""


def new_save_id(run_id: str) -> str:
    """An id for one save: digests of the run's id and of this machine, the process, its start, and chance."""
    run, process = xxh3_64_hexdigest(run_id.encode("utf-8", "surrogateescape")), os.getpid()
    return f"{run}-{_machine()}-{process}-{_started(process)}-{secrets.token_hex(4)}"


def partial_folder(target: Path, save_id: str) -> Path:
    """Where a save is written."""
    return target.parent / f".{target.name}.{save_id}.partial"


def begin(target: Path, save_id: str) -> str | None:
    """Make the folder to write into. Returns the id of the save that the target holds, if it holds one.

    From now on the save counts as alive, until `finish`.

    Raises:
        CheckpointError: the target exists and is not a checkpoint, or is the working folder of this process.
    """
    if _is_working_folder(target):
        raise CheckpointError(
            f"{target} is the working folder of this process, and a save replaces the whole folder: relative"
            " paths would lead nowhere afterwards\nsave to a folder in it: save_state('checkpoint')",
            path=str(target),
        )
    if target.exists() and not is_ours(target) and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(
            f"{target} exists and is not a checkpoint; it was left as it is\n"
            "save to another folder, or move this one away",
            path=str(target),
        )
    _live.add(save_id)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial_folder(target, save_id).mkdir()
    except OSError as error:
        if not os.path.lexists(partial_folder(target, save_id)):  # Path's methods raise at a name too long
            raise CheckpointError(
                f"{target} cannot be saved: {type(error).__name__}: {error}\n"
                "save to a folder in which this process may make files",
                path=str(target),
            ) from error
        raise CheckpointError(
            f"{target.parent} is one folder for several nodes, though project.save_on_each_node says that"
            " each has a disk of its own\nset project.save_on_each_node to false",
            path=str(target),
        ) from None
    return _holds(target)


def finish(save_id: str) -> None:
    """Say that this process writes the save no more: what is left of it may be removed."""
    _live.discard(save_id)


def publish(target: Path, save_id: str, *, seen: str | None, replace: bool, ranks: Collection[int]) -> None:
    """Give the complete, synced folder the name of the target.

    A checkpoint that had the name is `replaced` from then on; what else lay in its folder moves over.
    `seen`: what `begin` returned. `ranks`: those whose files are on this disk.

    Raises:
        CheckpointError: there is a checkpoint of that name that is not to be replaced, or that another
            save has put there meanwhile; or a file of this one is not there.
    """
    partial = partial_folder(target, save_id)
    _check_files(partial, ranks)
    sync_folder(partial)
    if not is_ours(target):
        if target.exists():  # an empty folder; not every system renames over one
            target.rmdir()
        partial.rename(target)
    elif not replace or _holds(target) != seen:
        raise CheckpointError(
            f"{target} has {'changed' if replace else 'appeared'} while this save was written: another run"
            f" saves into {target.parent}\n"
            "both keep what they have; give each run a folder (project_dir) of its own",
            path=str(target),
        )
    elif not _exchange(partial, target):  # two renames; `locate` finds the old one if we die between them
        target.rename(partial.with_suffix(".replaced"))
        partial.rename(target)
    sync_folder(target.parent)
    for old in replaced(target, save_id):
        _carry_over(old, target)


def replaced(target: Path, save_id: str) -> list[Path]:
    """The folder that had the target's name before this save was published, if there was one."""
    partial = partial_folder(target, save_id)
    return [old for old in (partial, partial.with_suffix(".replaced")) if old.exists()]


def discard(folder: Path, target: Path) -> None:
    """Remove a folder that a save of `target` made or replaced. What no save wrote moves to the target.

    Renamed first, so that a writer that was thought dead cannot publish what is left of it. What fails is
    logged.
    """
    aside = folder.with_suffix(".removed")
    try:
        if folder != aside:
            folder.rename(aside)
        _carry_over(aside, target)
        for path in sorted(aside.iterdir()):  # the manifest first
            if _OURS.fullmatch(path.name):
                path.unlink()
        aside.rmdir()
    except FileNotFoundError:  # another process removes it too
        return
    except OSError as error:
        logger.warning("%s, left by a save that has ended, could not be removed: %s", aside, error)


@contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """A folder in `folder` to write into, gone afterwards; what dead processes left there goes too."""
    for left in [path for path in folder.iterdir() if _WORKSHOP.fullmatch(path.name)]:
        if is_over(left.name.split(".")[1]) and not left.is_symlink():
            aside = left.with_suffix(".removed")
            with suppress(FileNotFoundError):  # another writer is clearing up as well
                left.replace(aside)  # first, so that a writer that was thought dead cannot go on
            shutil.rmtree(aside, ignore_errors=True)
    save_id = new_save_id("")
    made = folder / f".{save_id}.weights"
    _live.add(save_id)
    try:
        made.mkdir()
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        finish(save_id)


def locate(target: Path) -> Path:
    """The folder that holds the checkpoint `target`: itself, but for a kill between two renames."""
    left = [
        path for path, found in _leftovers(target.parent) if found.group(1, 3) == (target.name, "replaced")
    ]
    return next(filter(is_ours, sorted(left)), target) if not target.exists() else target


def carry_back(target: Path) -> None:
    """Move into the target what no save wrote, if a save died between the exchange and that."""
    for left, found in _leftovers(target.parent) if target.exists() else ():
        if found[1] == target.name and is_over(found[2]):
            _carry_over(left, target)


def holders(target: Path) -> dict[str, Path]:
    """Save id -> folder, of all that is complete and has been, or is to be, the checkpoint `target`."""
    left = sorted(left for left, found in _leftovers(target.parent) if found[1] == target.name)
    return {found.save_id: path for path in [*left, target] if (found := manifest_if_any(path))}


def leftovers(parent: Path) -> set[str]:
    """The ids of the saves that have left something in `parent`, or are being written there."""
    return {found[2] for _, found in _leftovers(parent)}


def clean(parent: Path, over: Collection[str], *, all_is_committed: bool) -> None:
    """Remove what the saves `over` left in `parent`; a checkpoint among it gets its name back.

    `all_is_committed`: no other disk may need what is complete here. What fails is logged.
    """
    for left, found in _leftovers(parent):
        target = parent / found[1]
        if found[2] not in over:
            _tell_of(left, found[2])
        elif all_is_committed or not is_ours(left):
            if found[3] == "replaced" and not target.exists():
                left.rename(target)
            else:
                discard(left, target)


def is_over(save_id: str) -> bool:
    """Whether the save is known to be written no more: this process has finished it, or its own is dead.

    A run's id says nothing: two jobs may have one. Of a process of another machine nothing is known here.
    """
    _, machine, number, started, _ = save_id.split("-")
    process = int(number)
    if machine != _machine():
        return False
    if process == os.getpid() and started == _started(process):
        return save_id not in _live
    return _has_ended(process) or _started(process) not in (started, _UNKNOWN)


def _carry_over(old: Path, target: Path) -> None:
    """Move what no save wrote from a checkpoint's old folder into its new one. What fails is logged."""
    for path in [path for path in old.iterdir() if not _OURS.fullmatch(path.name)]:
        try:
            target.mkdir(exist_ok=True)
            if os.path.lexists(target / path.name):
                raise FileExistsError("there is another of that name by now")
            path.rename(target / path.name)
        except FileNotFoundError:  # another process moves it too
            continue
        except OSError as error:
            logger.warning("%s belongs into %s, and cannot be moved there: %s", path, target, error)


def _is_working_folder(target: Path) -> bool:
    try:
        return target.samefile(os.curdir)
    except OSError:  # one of them is not there
        return False


def _check_files(folder: Path, ranks: Collection[int]) -> None:
    """Raises CheckpointError if a file for which the manifest vouches is not in the folder."""
    for name, record in read_manifest(folder).files.items():
        number = name.removeprefix("rank-").partition(".")[0]
        here = not number.isdecimal() or int(number) in ranks
        path = folder / name
        if here and (not path.is_file() or path.stat().st_size != record.size):
            raise CheckpointError(
                f"{path} is gone since it was written: something removes files of {folder.parent}\n"
                "save to a folder of which nothing else removes files",
                path=str(path),
            )


def _holds(target: Path) -> str | None:
    manifest = manifest_if_any(target)
    return None if manifest is None else manifest.save_id


def _tell_of(left: Path, save_id: str) -> None:
    """Once, that a leftover stays of which no rank knows whether it is still written."""
    if save_id not in _live and save_id.split("-")[1] != _machine() and left not in _told:
        _told.add(left)
        logger.warning(
            "%s is of a process on another machine, or before this one was started again; it stays, since"
            " that may be alive: remove it if it is not",
            left,
        )


def _leftovers(parent: Path) -> list[tuple[Path, re.Match[str]]]:
    entries = parent.iterdir() if parent.is_dir() else ()
    named = [(path, found) for path in entries if (found := _LEFTOVER.fullmatch(path.name))]
    return [(path, found) for path, found in named if not path.is_symlink()]


def _machine() -> str:
    """Where a process number means the same process: a machine since its start, as a container sees it."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    found = [
        platform.node(),
        boot.read_text() if boot.exists() else "",
        space.exists() and space.stat().st_ino,
    ]
    return xxh3_64_hexdigest(repr(found).encode())[:8]


def _started(process: int) -> str:
    """When the process was started, in the kernel's ticks; "" of one that has ended and is not yet reaped."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _UNKNOWN
    return "" if state in "ZX" else fields[18]


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
