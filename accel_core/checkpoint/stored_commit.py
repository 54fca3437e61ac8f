"""Commit a save in a store: create the next manifest, which fails if it is there.

    URL/SAVE_ID/...              the files of one save and their manifest: an ordinary checkpoint's folder
    URL/manifest-00000001.json   the commit: the manifest again. The next save to URL creates 00000002

The manifest of the highest number counts. A kill at any instant leaves the old checkpoint, or the new one.
What else is left is a folder that no manifest of such a number names. By rank 0 alone, but for `send`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from accel_core.checkpoint.commit import workshop
from accel_core.checkpoint.manifest import MANIFEST, commits_in, read_manifest
from accel_core.checkpoint.stored import StoredPath, UnreadableError
from accel_core.checkpoint.writer import SAVE_ID
from accel_core.errors import CheckpointError

logger = logging.getLogger(__name__)

_SPOOL: Final = "for files on their way to and from a store"
CLAIM: Final = "claim"
"""Name of the file that a save creates first; the second try must fail."""


def begin(path: StoredPath, save_id: str) -> int:
    """Prove that this store refuses a second create.

    Returns the number of this save's manifest.

    Raises:
        CheckpointError: it does not, or there is something else than a checkpoint.
    """
    here = path.listed()
    commits = commits_in(here)
    foreign = [name for name in here.entries if name == MANIFEST or not (commits or is_save(name))]
    if foreign:
        raise CheckpointError(
            f"{path} holds {foreign[0]}, which no save to this store has written; it was left as it is\n"
            "save under another name",
            path=str(path),
        )
    claim = str(path / save_id / CLAIM)
    try:
        path.store.create_stored(claim, save_id.encode())
        path.store.create_stored(claim, b"")
    except FileExistsError:
        return max(commits, default=0) + 1
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be saved: {type(error).__name__}: {error}\n"
            "check the name, and that this process may write there; or save to a disk",
            path=str(path),
        ) from error
    path.store.remove_stored([claim])
    raise CheckpointError(
        f"{path} cannot be saved: this store created one file twice, so two savers would not see each other\n"
        "save to a store that supports conditional writes (If-None-Match), or to a disk",
        path=str(path),
    )


def unfinished(path: StoredPath) -> set[str]:
    """Return the ids of saves that lie there, and that no manifest names.

    None where the manifest is damaged, which is logged.
    """
    here = path.listed()
    left = {name for name in here.entries if is_save(name)}
    try:
        return left - {read_manifest(path).save_id} if left and commits_in(here) else left
    except UnreadableError:
        raise
    except CheckpointError as error:
        logger.warning("nothing is removed of it: %s", error)
        return set()


def remove_unfinished(paths: Iterable[StoredPath], over: Collection[str]) -> None:
    """Remove what saves have left that are `over`. What fails is logged."""
    staying = []
    for path in paths:
        for save_id in sorted(unfinished(path)):
            if save_id in over:
                discard(path, save_id)
            else:
                staying.append(path / save_id)
    if staying:
        logger.warning(
            "%s%s: another save writes there, or was killed on another machine; it stays: remove it if it"
            " is over",
            staying[0],
            f" and {len(staying) - 1} more" if staying[1:] else "",
        )


def require_room(folder: Path, size: int) -> None:
    """Raise UnreadableError if the disk of the folder cannot take `size` bytes."""
    if (free := shutil.disk_usage(folder).free) < size:
        raise UnreadableError(
            f"{folder}, {_SPOOL}, has room for {free} bytes, and {size} are needed\n"
            "set TMPDIR to a folder with room"
        )


@contextmanager
def spool(size: int) -> Iterator[Path]:
    """Give a folder of this machine for files on their way; it is this user's alone.

    Raises:
        UnreadableError: there is no room for `size` bytes, or another user has made it.
    """
    user = os.getuid() if hasattr(os, "getuid") else "user"
    root = Path(tempfile.gettempdir(), f"accel-{user}")
    root.mkdir(mode=0o700, exist_ok=True)
    if os.name != "nt" and (root.is_symlink() or root.stat().st_uid != user):
        raise UnreadableError(f"{root}, {_SPOOL}, is not this user's\nset TMPDIR to a folder of your own")
    root.chmod(0o700)  # what an earlier program or a user's umask left open to others
    require_room(root, size)
    with workshop(root) as beside:
        yield beside


def send(beside: Path, names: Collection[str], folder: StoredPath) -> None:
    """Send these files, and free their room one by one. By each rank. Raises OSError."""
    for name in names:
        (folder / name).send(beside / name)
        (beside / name).unlink()


def publish(path: StoredPath, save_id: str, number: int) -> None:
    """Create the manifest of this number, once all files are there.

    Raises:
        CheckpointError: another save has created it, or a file is gone.
    """
    home = (path / save_id).listed()
    manifest = read_manifest(home)
    for name, record in manifest.files.items():
        if home.entries.get(name) != record.size:
            raise CheckpointError(
                f"{home / name} was removed after it was written: another program removes files of {path}\n"
                "save to a folder of which nothing else removes files",
                path=str(path),
            )
    content = (home / MANIFEST).content()
    try:
        _commit(path, number).create(content)
    except OSError as error:  # also where the answer was lost, and the store's library tried again
        try:
            done = is_committed(path, save_id, number)
        except CheckpointError:
            raise error from None
        if not done:
            raise (_overtaken(path, number) if isinstance(error, FileExistsError) else error) from None
    try:
        path.store.remove_stored([str(home / CLAIM)])
    except (OSError, CheckpointError) as error:
        logger.warning("%s, which is of no more use, could not be removed: %s", home / CLAIM, error)


def _overtaken(path: StoredPath, number: int) -> CheckpointError:
    return CheckpointError(
        f"{path} has {'changed' if number > 1 else 'appeared'} while this save was written: another run saves"
        f" into {path.parent}\nboth keep what they have; give each run a folder (project_dir) of its own",
        path=str(path),
    )


def is_committed(path: StoredPath, save_id: str, number: int) -> bool:
    """Return True if the manifest of this number is this save's.

    Raises:
        UnreadableError: the store does not answer.
    """
    name = _commit(path, number).name
    here = path.listed()
    if name not in here.entries:
        return False
    return bool(json.loads((here / name).content())["save_id"] == save_id)


def remove_older(path: StoredPath, number: int) -> None:
    """Remove the saves that this number's has replaced, each one's manifest last.

    What fails is logged: the save itself is complete.
    """
    try:
        here = path.listed()
        for older, name in commits_in(here).items():
            if older < number:
                save_id = json.loads((here / name).content())["save_id"]
                if save_id in here.entries:
                    _empty(path / save_id)
                path.remove([name])
    except (OSError, CheckpointError) as error:
        logger.warning("%s: what this save has replaced could not be removed: %s", path, error)


def remove_stored(path: StoredPath) -> None:
    """Remove a whole checkpoint, its manifests first. What fails is logged."""
    try:
        here = path.listed()
        path.remove([*commits_in(here).values()])
        for name in filter(is_save, here.entries):
            _empty(path / name)
    except (OSError, CheckpointError) as error:
        logger.warning("%s could not be removed: %s", path, error)


def discard(path: StoredPath, save_id: str) -> None:
    """Remove the files of a save that did not end. What fails is logged."""
    try:
        if not commits_in(path.listed()) or read_manifest(path).save_id != save_id:
            _empty(path / save_id)
    except (OSError, CheckpointError) as error:
        logger.warning("%s, left by a save that has ended, could not be removed: %s", path / save_id, error)


def _empty(folder: StoredPath) -> None:
    """Remove the files of a save, its manifest first."""
    entries: Mapping[str, int | None] = folder.entries
    folder.remove(sorted(entries, key=lambda name: name != MANIFEST))


def is_save(name: str) -> bool:
    """Return True if this is the name of one save's folder."""
    return re.fullmatch(SAVE_ID, name) is not None


def _commit(path: StoredPath, number: int) -> StoredPath:
    return path / f"manifest-{number:08d}.json"
