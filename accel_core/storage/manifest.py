"""The manifest: what a checkpoint is, and the proof that all of it is there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from attrs import frozen
from xxhash import xxh3_64_hexdigest

from accel_core.storage.files import FileRecord, UnreadableError, understanding

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
    with understanding(path):
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
