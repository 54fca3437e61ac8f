"""The manifest: what a checkpoint is, and the proof that all of it is there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final

from attrs import frozen
from cattrs import Converter
from xxhash import xxh3_64_hexdigest

from accel_core.checkpoint.files import (
    FileRecord,
    cannot_be_read,
    damaged,
    not_found,
    open_file,
    understanding,
    write_file,
)
from accel_core.checkpoint.stored import Place, StoredPath, UnreadableError
from accel_core.errors import CheckpointError

MANIFEST: Final = "manifest.json"
MANIFEST_BYTES: Final = 1 << 28
"""No manifest is larger: it has a line of some 100 bytes for each file."""
COMMIT: Final = re.compile(r"manifest-(\d{8})\.json")
"""Names of manifests in a store: each save takes the next number."""
FORMAT: Final = "accel-checkpoint"
VERSION: Final = 1
_CONVERTER: Final = Converter(detailed_validation=False)


@frozen
class Manifest:
    """The members that loading acts on; docs/checkpoint-format.md lists all."""

    save_id: str
    run_id: str
    world: Mapping[str, int]
    files: Mapping[str, FileRecord]
    name: str | None
    """The name that the run gave it; None where the user named it."""
    iteration: int
    lineage: Sequence[str]
    domains: Sequence[Sequence[int]]
    """Node -> the ranks whose files are on its disk; empty where all see one disk."""
    members: Mapping[str, Any]
    """Every member, as read."""


def manifest_of(members: Mapping[str, Any]) -> bytes:
    """Return the manifest's content; its last line is a checksum of the rest."""
    named = {"format": FORMAT, "version": VERSION, **members}
    text = json.dumps(named, indent=2, allow_nan=False, default=repr)
    return _with_checksum(text.removesuffix("\n}").encode())


def write_manifest(folder: Place, content: bytes) -> None:
    """Write and sync the manifest."""
    if isinstance(folder, StoredPath):
        with suppress(FileExistsError):  # the answer was lost, and the store's library tried again
            (folder / MANIFEST).create(content)
    else:
        write_file(folder / MANIFEST, [content])


def commits_in(folder: StoredPath) -> dict[int, str]:
    """Number -> name of the manifests in a folder of a store, the newest last."""
    named = {int(found[1]): name for name in folder.entries if (found := COMMIT.fullmatch(name))}
    return {number: named[number] for number in sorted(named)}


def folder_of_files(folder: Place, manifest: Manifest) -> Place:
    """Return the folder that holds the checkpoint's files.

    In a store each save has one of its own.
    """
    if isinstance(folder, Path):
        return folder
    here = folder.listed()
    return (here / manifest.save_id).listed() if manifest.save_id in here.entries else here


def is_there(folder: Place) -> bool:
    """Return True if there is something to load.

    In a store, a save that has not ended is nothing.
    """
    return folder.exists() if isinstance(folder, Path) else _path_in(folder) is not None


def _path_in(folder: Place) -> Place | None:
    """Return the manifest that counts, if there is one."""
    if isinstance(folder, Path):
        return folder / MANIFEST if os.path.lexists(folder / MANIFEST) else None
    here = folder.listed()
    name = next(reversed(commits_in(here).values()), MANIFEST)
    return here / name if name in here.entries else None


def read_manifest(folder: Place) -> Manifest:
    """Return the manifest of a checkpoint, checked.

    Raises:
        CheckpointError: there is none, it is damaged, or of a version that is not known here.
    """
    path = _path_in(folder)
    if path is None:
        raise CheckpointError(
            f"{folder} is not a checkpoint: {MANIFEST} is missing\n"
            "give the folder that save_state() returned",
            path=str(folder),
        )
    try:
        content = _content(path)
    except FileNotFoundError as error:  # of a store, where a newer one has replaced it
        assert isinstance(path, StoredPath)
        if isinstance(said := not_found(path, error), UnreadableError):
            raise said from error
        return read_manifest(folder)
    with understanding(path):
        members = json.loads(content, parse_constant=_no_number)
        if (members["format"], members["version"]) != (FORMAT, VERSION):
            raise UnreadableError(
                f"{path} is of format {members['format']} version {members['version']}\n"
                f"this accel-core reads {FORMAT} version {VERSION}; load it with the one that wrote it",
                path=str(path),
            )
        if content != _with_checksum(content[: -len(_with_checksum(b""))]):
            raise ValueError("its checksum does not fit its content")
        if outside := [name for name in members["files"] if Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} is not a file in this folder")
        size, readers = members["world"]["size"], members["world"]["readers"]
        if not (1 <= size <= len(members["files"]) and readers >= 1):
            raise ValueError(f"it is of a world of {size} ranks and {readers} readers")
        return _CONVERTER.structure({**members, "members": members}, Manifest)


def _content(path: Place) -> bytes:
    """Return the content of a manifest. Raises CheckpointError."""
    if isinstance(path, StoredPath):
        if path.size is None or path.size > MANIFEST_BYTES:
            raise damaged(path, f"it is not a file of at most {MANIFEST_BYTES} bytes")
        return path.content()
    handle = open_file(path)
    try:
        found = os.fstat(handle)
        if not S_ISREG(found.st_mode) or found.st_size > MANIFEST_BYTES:
            raise damaged(path, f"it is not a file of at most {MANIFEST_BYTES} bytes")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise cannot_be_read(path, error) from error
    finally:
        os.close(handle)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def manifest_if_any(folder: Place) -> Manifest | None:
    """Return the manifest, or None where `read_manifest` raises."""
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def is_ours(folder: Place) -> bool:
    """Return True if some version of this format wrote the folder, damaged or not."""
    try:
        path = _path_in(folder)
        return path is not None and bool(json.loads(_content(path))["format"] == FORMAT)
    except (CheckpointError, FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _with_checksum(content: bytes) -> bytes:
    return content + f',\n  "checksum": "{xxh3_64_hexdigest(content)}"\n}}\n'.encode()
