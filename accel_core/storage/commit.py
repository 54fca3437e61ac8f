"""The commit of a save: the exclusive creation of the next manifest.

    NAME/SAVE_ID/...              the files of one save
    NAME/manifest-00000007.json   the commit. The whole one of the highest number counts

A kill at any instant leaves the checkpoint before, or the new one. Nothing is renamed, and other files in
the folder are never looked at. What is left of a save that was killed is a folder SAVE_ID that no manifest
names and no process claims. The first rank of each disk calls the functions that write.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen
from xxhash import xxh3_64_hexdigest

from accel_core.errors import CheckpointError
from accel_core.storage.files import (
    DamagedError,
    FileRecord,
    UnreadableError,
    cannot_be_read,
    damaged,
    listed,
    malformed_as_damaged,
)

if TYPE_CHECKING:
    from accel_core.storage.protocols import Storage

logger = logging.getLogger(__name__)

FORMAT: Final = "accel-checkpoint"
VERSION: Final = 1
SAVE: Final = re.compile(r"save-[0-9a-f]{16}")
"""Ids of saves, and the names of their folders."""
_KINDS: Final = {
    "save_id": str,
    "run_id": str,
    "iteration": int,
    "lineage": list,
    "domains": list,
    "world": dict,
}
_COMMIT: Final = re.compile(r"manifest-(\d{8})\.json")
MANIFEST_BYTES: Final = 1 << 28
"""No manifest is larger: it has a line of some 100 bytes for each file."""


@frozen
class Manifest:
    """The members that loading acts on; docs/checkpoint-format.md lists all.

    number: of the commit, which its file is named for. domains: node -> the ranks with files on its disk;
    empty where all see one. name: None where the user named the checkpoint. members: every one, as read.
    """

    number: int
    save_id: str
    run_id: str
    world: Mapping[str, int]
    files: Mapping[str, FileRecord]
    name: str | None
    iteration: int
    lineage: Sequence[str]
    domains: Sequence[Sequence[int]]
    members: Mapping[str, Any]


def manifest_of(members: Mapping[str, Any]) -> bytes:
    """Return the manifest's content; its last line is a checksum of the rest."""
    named = {"format": FORMAT, "version": VERSION, **members}
    text = json.dumps(named, indent=2, allow_nan=False, default=repr)
    return _with_checksum(text.removesuffix("\n}").encode())


def understood(content: bytes, path: str, number: int) -> Manifest:
    """Return the manifest that this file has.

    Raises:
        CheckpointError: it is damaged, or of a version that is not known here.
    """
    with malformed_as_damaged(path):
        members = json.loads(content, parse_constant=_no_number)
        if (members["format"], members["version"]) != (FORMAT, VERSION):
            raise UnreadableError(
                f"{path} is of format {members['format']} version {members['version']}\n"
                f"this accel-core reads {FORMAT} version {VERSION}; load it with the one that wrote it",
                path=path,
            )
        if content != _with_checksum(content[: -len(_with_checksum(b""))]):
            raise ValueError("its checksum does not fit its content")
        if outside := [name for name in members["files"] if PurePath(name).name != name]:
            raise ValueError(f"{outside[0]!r} is not a file in this folder")
        if not SAVE.fullmatch(members["save_id"]):
            raise ValueError(f"{members['save_id']!r} is not the id of a save")
        size, readers = members["world"]["size"], members["world"]["readers"]
        if not (1 <= size <= len(members["files"]) and readers >= 1):
            raise ValueError(f"it is of a world of {size} ranks and {readers} readers")
        files = {
            name: FileRecord(int(each["size"]), each["digest"]) for name, each in members["files"].items()
        }
        if odd := [name for name, kind in _KINDS.items() if type(members[name]) is not kind]:
            raise ValueError(f"{odd[0]!r} is {members[odd[0]]!r}")
        named = ("save_id", "run_id", "world", "name", "iteration", "lineage", "domains")
        return Manifest(number, files=files, members=members, **{name: members[name] for name in named})


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _with_checksum(content: bytes) -> bytes:
    return content + f',\n  "checksum": "{xxh3_64_hexdigest(content)}"\n}}\n'.encode()


# -- what is there --------------------------------------------------------------------------------------


def new_save_id() -> str:
    """Return an id for one save."""
    return f"save-{secrets.token_hex(8)}"


def commits(place: Storage) -> dict[int, str]:
    """Return number -> name of the manifests in a folder, the newest last. Raises UnreadableError."""
    return _numbered(listed(place))


def _numbered(entries: Iterable[str]) -> dict[int, str]:
    found = {int(named[1]): name for name in entries if (named := _COMMIT.fullmatch(name))}
    return {number: found[number] for number in sorted(found)}


def manifests(place: Storage) -> list[Manifest]:
    """Return the manifests of a folder that are whole, the newest first. Raises UnreadableError."""
    return _whole(place)[0]


def read_manifest(place: Storage) -> Manifest:
    """Return the manifest that counts: of the newest commit that is whole.

    Raises:
        CheckpointError: there is none, it is damaged, or of a version that is not known here.
    """
    found, failure = _whole(place, 1)
    if found:
        return found[0]
    raise failure or not_a_checkpoint(place)


def not_a_checkpoint(place: Storage) -> CheckpointError:
    """Return the error for a folder without a manifest."""
    return CheckpointError(
        f"{place} is not a checkpoint: manifest-N.json is missing\n"
        "give the folder that save_state() returned",
        path=str(place),
    )


def _whole(place: Storage, most: int | None = None) -> tuple[list[Manifest], CheckpointError | None]:
    """Return the newest manifests that are whole, and what is wrong with the first that is not."""
    while True:
        entries, found, failure = listed(place), list[Manifest](), None
        try:
            for number, name in reversed(_numbered(entries).items()):
                try:
                    found.append(_read(place, number, name, entries[name]))
                except DamagedError as error:  # it may be being written: the one before counts until it is
                    failure = failure or error
                if len(found) == most:
                    break
        except FileNotFoundError:  # it was replaced meanwhile
            continue
        return found, failure


def _read(place: Storage, number: int, name: str, size: int | None) -> Manifest:
    """Return a manifest. Raises CheckpointError; FileNotFoundError if it is gone."""
    path = f"{place}/{name}"
    if size is None or size > MANIFEST_BYTES:
        raise damaged(path, f"it is not a file of at most {MANIFEST_BYTES} bytes")
    content = bytearray(size)
    try:
        place.read(name, 0, memoryview(content))
    except FileNotFoundError as error:
        if name not in listed(place):
            raise
        raise cannot_be_read(path, error) from error
    except (OSError, EOFError) as error:
        raise cannot_be_read(path, error) from error
    return understood(bytes(content), path, number)


def intact(place: Storage) -> Manifest | None:
    """Return the manifest; None of a damaged checkpoint. Raises UnreadableError."""
    try:
        return read_manifest(place)
    except UnreadableError:
        raise
    except CheckpointError:
        return None


# -- by the first rank of each disk ------------------------------------------------------------------------


def begin(place: Storage) -> int:
    """Return the number of the next commit.

    Raises:
        CheckpointError: the place holds something, and is no checkpoint.
    """
    try:
        entries = place.list()
    except NotADirectoryError:
        entries = {"": 0}
    except OSError as error:
        raise cannot_be_saved(place, error) from error
    numbers = [int(named[1]) for name in entries if (named := _COMMIT.fullmatch(name))]
    if entries and not numbers and not any(map(SAVE.fullmatch, entries)):
        raise CheckpointError(
            f"{place} exists and is not a checkpoint; it was left as it is\n"
            "save to another folder, or move this one away",
            path=str(place),
        )
    return max(numbers, default=0) + 1


def cannot_be_saved(place: Storage, error: OSError) -> CheckpointError:
    """Return the error for a place that cannot be written."""
    return CheckpointError(
        f"{place} cannot be saved: {type(error).__name__}: {error}\n"
        "save to a folder in which this process may create files",
        path=str(place),
    )


def commit(place: Storage, members: Mapping[str, object], number: int, sizes: Mapping[str, int]) -> None:
    """Create the manifest of this number. sizes: of the files of this save that are in this place.

    Raises:
        CheckpointError: another save has come between, or a file of this one is not there.
    """
    save_id = str(members["save_id"])
    home = place.at(save_id)
    entries = listed(home)
    if gone := [name for name, size in sizes.items() if entries.get(name) != size]:
        raise CheckpointError(
            f"{home}/{gone[0]} was removed after it was written: another program removes files of {place}\n"
            "save to a folder of which nothing else removes files",
            path=str(place),
        )
    try:
        place.create(f"manifest-{number:08d}.json", manifest_of(members))
    except OSError as error:
        if not is_committed(place, save_id):
            if not isinstance(error, FileExistsError):
                raise
            raise overtaken(place, number) from None


def overtaken(place: Storage, number: int) -> CheckpointError:
    """Return the error for a place where another save has created the commit of this number."""
    return CheckpointError(
        f"{place} has {'changed' if number > 1 else 'appeared'} while this save was written: another run"
        " saves there\nboth keep what they have; give each run a folder (project_dir) of its own",
        path=str(place),
    )


def is_committed(place: Storage, save_id: str) -> bool:
    """Return True if a manifest names this save. Raises UnreadableError."""
    return any(manifest.save_id == save_id for manifest in manifests(place))


def prune(place: Storage, keep: int) -> None:
    """Remove commits before this number, and what saves that are over have left. What fails is logged.

    Manifests go first, then the files that none of those left names. A writer commits while it holds its
    claim, so that what is not claimed, and not named afterwards, never will be.
    """
    try:
        found = commits(place)
        if older := [name for number, name in found.items() if number < keep]:
            place.remove(older)
        _remove_unnamed(place)
    except (OSError, CheckpointError) as error:
        logger.warning("%s: what this save replaces could not be removed: %s", place, error)


def _remove_unnamed(place: Storage) -> None:
    over = {name for name in listed(place) if SAVE.fullmatch(name) and not place.at(name).is_claimed()}
    if not over:
        return
    found, failure = _whole(place)
    if failure is not None:  # nobody knows what it names
        logger.warning("nothing is removed there: %s", failure)
        return
    for save_id in over.difference(manifest.save_id for manifest in found):
        home = place.at(save_id)
        home.remove([*listed(home)])


def discard(place: Storage, save_id: str) -> None:
    """Remove a save that failed, its manifest first. What fails is logged."""
    try:
        place.remove([f"manifest-{m.number:08d}.json" for m in manifests(place) if m.save_id == save_id])
        home = place.at(save_id)
        home.remove([*listed(home)])
        place.remove([])
    except (OSError, CheckpointError) as error:
        logger.warning("%s, left by a failed save, could not be removed: %s", place.at(save_id), error)


def remove(place: Storage) -> list[str]:
    """Remove a checkpoint, its manifests first. Returns what else lies there. Raises OSError."""
    place.remove([*commits(place).values()])
    for name in filter(SAVE.fullmatch, listed(place)):
        home = place.at(name)
        if not home.is_claimed():
            home.remove([*listed(home)])
    place.remove([])
    return [name for name in listed(place) if not SAVE.fullmatch(name)]
