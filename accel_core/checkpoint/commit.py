"""Commit a save: give its folder the target's name, in one step or not at all.

A save is written beside its target as `.NAME.SAVE_ID.partial` and takes the target's name last. A
kill at any instant leaves the old checkpoint, or the new one. What else is left bears such a name, and
the id in it names the process that made it. Only what a dead process left is removed, and nothing
that no save wrote. One rank of each disk calls these functions, the others wait.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from accel_core.checkpoint.files import sync_folder
from accel_core.checkpoint.manifest import is_ours, manifest_if_any, read_manifest
from accel_core.checkpoint.stored import Place
from accel_core.checkpoint.writer import (
    SAVE_ID,
    begin_writing,
    end_writing,
    is_of_another_machine,
    is_over,
    new_save_id,
)
from accel_core.errors import CheckpointError

logger = logging.getLogger(__name__)

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_LEFTOVER: Final = re.compile(rf"\.(.+)\.({SAVE_ID})\.(partial|replaced|removed)")
_WORKSHOP: Final = re.compile(rf"\.({SAVE_ID})\.(weights|removed)")
_OURS: Final = re.compile(r"manifest\.json|state\.json|rank-\d{5,}\.(json|safetensors)|\.nfs[0-9a-f]+")
"""Names of a checkpoint's own files; any other file in its folder is the user's.

NFS renames an open file that is removed to `.nfs...`.
"""
_told: Final[set[Path]] = set()
"""The leftovers of which the log has said that they stay."""


@frozen
class Leftover:
    """A folder of a save that does not have the name of its target.

    kind: `partial`, being written or complete; `replaced`, the checkpoint of before; `removed`, on its
    way out.
    """

    path: Path
    target: Path
    save_id: str
    kind: str


def partial_folder(target: Path, save_id: str) -> Path:
    """Return the folder that a save is written into."""
    return target.parent / f".{target.name}.{save_id}.partial"


def refuse_others(target: Path) -> None:
    """Raise CheckpointError where a save must not write.

    That is over what is not a checkpoint, and over the working folder of this process.
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


def begin(target: Path, save_id: str, size: int) -> str | None:
    """Make the folder to write `size` bytes into.

    Returns the id of the save in the target.

    From now on this process writes the save, until `end_writing`.

    Raises:
        CheckpointError: the target exists and is not a checkpoint, or is the working folder of this process;
            or its disk has no room.
    """
    refuse_others(target)
    begin_writing(save_id)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(target.parent)
        if disk.free < size and disk.total:  # of some file systems nothing is known
            raise CheckpointError(
                f"{target} cannot be saved: its disk has room for {disk.free} bytes, and {size} are needed\n"
                "make room, or save to another disk",
                path=str(target),
            )
        partial_folder(target, save_id).mkdir()
    except OSError as error:
        if not os.path.lexists(partial_folder(target, save_id)):  # Path's methods raise at a name too long
            raise CheckpointError(
                f"{target} cannot be saved: {type(error).__name__}: {error}\n"
                "save to a folder in which this process may create files",
                path=str(target),
            ) from error
        raise CheckpointError(
            f"{target.parent} is one folder for several nodes, though project.save_on_each_node says that"
            " each has a disk of its own\nset project.save_on_each_node to false",
            path=str(target),
        ) from None
    return _holds(target)


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
    """Return the folder that had the target's name before this save, if any."""
    partial = partial_folder(target, save_id)
    return [old for old in (partial, partial.with_suffix(".replaced")) if old.exists()]


def discard(folder: Path, target: Path) -> None:
    """Remove a folder that a save of `target` made or replaced.

    Files that no save wrote move to the target.

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
    """Give a folder to write into; folders of dead processes are removed."""
    named = [(path, name) for path in folder.iterdir() if (name := _WORKSHOP.fullmatch(path.name))]
    for left in [path for path, name in named if is_over(name[1]) and not path.is_symlink()]:
        aside = left.with_suffix(".removed")
        with suppress(FileNotFoundError):  # another writer is clearing up as well
            left.replace(aside)  # first, so that a writer that was thought dead cannot go on
        shutil.rmtree(aside, ignore_errors=True)
    save_id = new_save_id("")
    made = folder / f".{save_id}.weights"
    begin_writing(save_id)
    try:
        made.mkdir()
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        end_writing(save_id)


def locate(target: Place) -> Place:
    """Return the folder that holds the checkpoint `target`.

    It is another than the target after a kill between two renames.
    """
    if not isinstance(target, Path) or target.exists():
        return target
    old = sorted(left.path for left in _leftovers_of(target) if left.kind == "replaced")
    return next(filter(is_ours, old), target)


def carry_back(target: Path) -> None:
    """Move the user's files into the target, if a save died before it did."""
    for left in _leftovers_of(target) if target.exists() else ():
        if is_over(left.save_id):
            _carry_over(left.path, target)


def find_copies(target: Path) -> dict[str, Path]:
    """Save id -> folder, of each complete folder that was or will be `target`."""
    paths = [*sorted(left.path for left in _leftovers_of(target)), target]
    return {manifest.save_id: path for path in paths if (manifest := manifest_if_any(path))}


def leftover_ids(parent: Path) -> set[str]:
    """Return the ids of saves that left folders in `parent` or write there now."""
    return {left.save_id for left in _leftovers(parent)}


def remove_leftovers(parent: Path, over: Collection[str], *, keep_complete: bool) -> None:
    """Remove what the saves `over` left in `parent`. What fails is logged.

    | save | folder | what is done |
    | --- | --- | --- |
    | not in `over`: its process may live | any | stays; a warning, if this machine cannot tell |
    | in `over` | complete, and `keep_complete`: another disk may need this save | stays |
    | in `over` | `replaced`, and no folder has the target's name | gets the name back |
    | in `over` | any other | removed; what no save wrote moves to the target |
    """
    staying = []
    for left in _leftovers(parent):
        if left.save_id not in over:
            staying.append(left)
        elif keep_complete and is_ours(left.path):
            continue
        elif left.kind == "replaced" and not left.target.exists():
            left.path.rename(left.target)
        else:
            discard(left.path, left.target)
    _warn_once(staying)


def _carry_over(old: Path, target: Path) -> None:
    """Move the user's files from a checkpoint's old folder into its new one.

    What fails is logged.
    """
    for path in [path for path in old.iterdir() if not _OURS.fullmatch(path.name)]:
        try:
            target.mkdir(exist_ok=True)
            if os.path.lexists(target / path.name):
                raise FileExistsError("another file of that name exists by now")
            path.rename(target / path.name)
        except FileNotFoundError:  # another process moves it too
            continue
        except OSError as error:
            logger.warning("%s should be in %s, and could not be moved there: %s", path, target, error)


def _is_working_folder(target: Path) -> bool:
    try:
        return target.samefile(os.curdir)
    except OSError:  # one of them is not there
        return False


def _check_files(folder: Path, ranks: Collection[int]) -> None:
    """Raise CheckpointError if a file of the manifest is not in the folder."""
    for name, record in read_manifest(folder).files.items():
        number = name.removeprefix("rank-").partition(".")[0]
        here = not number.isdecimal() or int(number) in ranks
        path = folder / name
        if here and (not path.is_file() or path.stat().st_size != record.size):
            raise CheckpointError(
                f"{path} was removed after it was written: another program removes files of {folder.parent}\n"
                "save to a folder of which nothing else removes files",
                path=str(path),
            )


def _holds(target: Path) -> str | None:
    manifest = manifest_if_any(target)
    return None if manifest is None else manifest.save_id


def _warn_once(staying: Iterable[Leftover]) -> None:
    new = sorted(left.path for left in staying if is_of_another_machine(left.save_id))
    new = [path for path in new if path not in _told]
    if new:
        _told.update(new)
        logger.warning(
            "%s%s was written by a process on another machine, or before this machine was restarted; it is"
            " kept, as that process may be alive: remove it if the process has ended",
            new[0],
            f" (and {len(new) - 1} more)" if new[1:] else "",
        )


def _leftovers(parent: Path) -> list[Leftover]:
    entries = parent.iterdir() if parent.is_dir() else ()
    named = [(path, name) for path in entries if (name := _LEFTOVER.fullmatch(path.name))]
    return [
        Leftover(path, parent / name[1], name[2], name[3]) for path, name in named if not path.is_symlink()
    ]


def _leftovers_of(target: Path) -> list[Leftover]:
    return [left for left in _leftovers(target.parent) if left.target == target]


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    try:
        renameat2: Any = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
