"""The commit of a save: the exclusive creation of the next manifest.

    NAME/SAVE_ID/...              the files of one save
    NAME/manifest-00000007.json   the commit. The whole manifest with the highest number is valid

A kill at any instant leaves the earlier checkpoint or the new checkpoint. Nothing is renamed, and other files
in the folder are never read. A killed save leaves a folder SAVE_ID that no manifest names and no process
claims. The first rank of each disk calls the functions that write.
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
"""Largest size of a manifest, which has a line of about 100 bytes per file."""


@frozen
class Manifest:
    """The members of a manifest that loading uses; docs/checkpoint-format.md lists all members."""

    number: int
    """Number of the commit, from the name of its file."""
    save_id: str
    run_id: str
    world: Mapping[str, int]
    files: Mapping[str, FileRecord]
    name: str | None
    """Name in the numbered series; None if the user named the checkpoint."""
    iteration: int
    lineage: Sequence[str]
    domains: Sequence[Sequence[int]]
    """Node -> the ranks with files on its disk. Empty if all ranks see one disk."""
    members: Mapping[str, Any]
    """All members, as read."""


def manifest_of(members: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest; its last member is a checksum of the text before it."""
    named = {"format": FORMAT, "version": VERSION, **members}
    text = json.dumps(named, indent=2, allow_nan=False, default=repr)
    return _with_checksum(text.removesuffix("\n}").encode())


def understood(content: bytes, path: str, number: int) -> Manifest:
    """Return the manifest in the content of a file.

    Raises:
        CheckpointError: the manifest is damaged, or of an unknown version.
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


# -- reading manifests -----------------------------------------------------------------------------------


def new_save_id() -> str:
    """Return a new random id for a save."""
    return f"save-{secrets.token_hex(8)}"


def commits(place: Storage) -> dict[int, str]:
    """Return number -> file name of the manifests in a folder, the newest last. Raises UnreadableError."""
    return _numbered(listed(place))


def _numbered(entries: Iterable[str]) -> dict[int, str]:
    found = {int(named[1]): name for name in entries if (named := _COMMIT.fullmatch(name))}
    return {number: found[number] for number in sorted(found)}


def manifests(place: Storage) -> list[Manifest]:
    """Return the whole manifests of a folder, the newest first. Raises UnreadableError."""
    return _whole(place)[0]


def read_manifest(place: Storage) -> Manifest:
    """Return the manifest of the newest commit that is whole.

    Raises:
        CheckpointError: the folder has no manifest, or only damaged manifests, or a manifest of an unknown
            version.
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
    """Return the newest `most` whole manifests, and the error of the newest damaged manifest."""
    while True:
        entries, found, failure = listed(place), list[Manifest](), None
        try:
            for number, name in reversed(_numbered(entries).items()):
                try:
                    found.append(_read(place, number, name, entries[name]))
                except DamagedError as error:  # maybe still being written: use the earlier one
                    failure = failure or error
                if len(found) == most:
                    break
        except FileNotFoundError:  # a newer save has removed it: list again
            continue
        return found, failure


def _read(place: Storage, number: int, name: str, size: int | None) -> Manifest:
    """Read a manifest. Raises CheckpointError, or FileNotFoundError if the file was removed."""
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
    """Return the manifest of a checkpoint; None if it is damaged. Raises UnreadableError."""
    try:
        return read_manifest(place)
    except UnreadableError:
        raise
    except CheckpointError:
        return None


# -- writing, by the first rank of each disk ---------------------------------------------------------------


def begin(place: Storage) -> int:
    """Return the number of the next commit.

    Raises:
        CheckpointError: the folder has files but is not a checkpoint, or cannot be listed.
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
    """Create the manifest with this number.

    Args:
        place: the checkpoint's folder.
        members: all members of the manifest.
        number: the number of the commit.
        sizes: name -> bytes of the files of this save that are on this disk.

    Raises:
        CheckpointError: another save has created the manifest, or a file of this save is missing.
        OSError: the manifest cannot be written.
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
    """Return the error for a folder in which another save has created the commit with this number."""
    return CheckpointError(
        f"{place} has {'changed' if number > 1 else 'appeared'} while this save was written: another run"
        " saves there\nboth keep what they have; give each run a folder (project_dir) of its own",
        path=str(place),
    )


def is_committed(place: Storage, save_id: str) -> bool:
    """Return True if a manifest names this save. Raises UnreadableError."""
    return any(manifest.save_id == save_id for manifest in manifests(place))


def prune(place: Storage, keep: int) -> None:
    """Remove commits below the number `keep` and the files of killed saves. Failures are logged.

    Manifests are removed first, then the saves that no remaining manifest names. A save commits while it
    holds its claim: if its folder is unclaimed, and no manifest read afterwards names it, none ever will.
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
    if failure is not None:  # the damaged manifest may name any of the saves
        logger.warning("nothing is removed there: %s", failure)
        return
    for save_id in over.difference(manifest.save_id for manifest in found):
        home = place.at(save_id)
        home.remove([*listed(home)])


def discard(place: Storage, save_id: str) -> None:
    """Remove a failed save, its manifest first. Failures are logged."""
    try:
        place.remove([f"manifest-{m.number:08d}.json" for m in manifests(place) if m.save_id == save_id])
        home = place.at(save_id)
        home.remove([*listed(home)])
        place.remove([])
    except (OSError, CheckpointError) as error:
        logger.warning("%s, left by a failed save, could not be removed: %s", place.at(save_id), error)


def remove(place: Storage) -> list[str]:
    """Remove a checkpoint, its manifests first; return the names of other entries.

    Raises:
        OSError: an entry cannot be removed.
        UnreadableError: the folder cannot be listed.
    """
    place.remove([*commits(place).values()])
    for name in filter(SAVE.fullmatch, listed(place)):
        home = place.at(name)
        if not home.is_claimed():
            home.remove([*listed(home)])
    place.remove([])
    return [name for name in listed(place) if not SAVE.fullmatch(name)]
