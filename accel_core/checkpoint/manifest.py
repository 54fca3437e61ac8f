"""manifest.json: what a checkpoint is, and the proof that all of it is there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import asdict, field, frozen
from xxhash import xxh3_64_hexdigest

from accel_core.checkpoint.files import BlockWriter, DataFile, FileRecord, damaged
from accel_core.errors import CheckpointError

__all__ = ["MANIFEST", "Manifest", "is_ours", "read_manifest", "write_manifest"]

MANIFEST: Final = "manifest.json"
FORMAT: Final = "accel-checkpoint"
VERSION: Final = 1
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\Z")
_CHECKSUM: Final = ',\n  "checksum": "{}"\n}}\n'


@frozen(kw_only=True)
class Manifest:
    """What one save wrote. Readers ignore members they do not know."""

    format: str = FORMAT
    version: int = VERSION
    save_id: str
    run_id: str
    step: int | None
    time: str
    """UTC, ISO 8601. For people: nothing is decided by it."""
    world: Mapping[str, int]
    """size, nodes, readers."""
    mesh: Mapping[str, int] = field(factory=dict)
    stack: Mapping[str, Any]
    versions: Mapping[str, str]
    config: Any = None
    random: Mapping[str, Any]
    """What resuming elsewhere does to random numbers: docs/checkpoint-format.md."""
    files: Mapping[str, FileRecord]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and sync the manifest; its last line is a checksum of all bytes before it."""
    text = json.dumps(asdict(manifest), indent=2, allow_nan=False).removesuffix("\n}")
    with BlockWriter(folder / MANIFEST) as file:
        file.write((text + _CHECKSUM.format(xxh3_64_hexdigest(text.encode()))).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked.

    Raises:
        CheckpointError: there is none, it is damaged, or of a version that is not known here.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint: it has no {MANIFEST}\ngive the folder that save_state() returned",
            path=str(folder),
        )
    content = path.read_bytes()
    tail = len(_CHECKSUM.format("0" * 16))
    try:
        members = json.loads(content)
        if members["format"] != FORMAT or members["version"] != VERSION:
            raise CheckpointError(
                f"{path} is of format {members['format']} version {members['version']}\n"
                f"this accel-core reads {FORMAT} version {VERSION}; load it with the one that wrote it",
                path=str(path),
            )
        if content[-tail:] != _CHECKSUM.format(xxh3_64_hexdigest(content[:-tail])).encode():
            raise damaged(path, "its checksum does not fit its content")
        return _structure(members)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"it cannot be understood ({error!r})") from error


def is_ours(folder: Path) -> bool:
    """Whether some version of this format wrote the folder, damaged or not."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def open_file(folder: Path, name: str, manifest: Manifest) -> DataFile:
    """A file that the manifest lists."""
    if name not in manifest.files:
        raise damaged(folder / MANIFEST, f"it lists no file {name}")
    return DataFile(folder / name, manifest.files[name])


def _structure(members: Mapping[str, Any]) -> Manifest:
    known = {name: members[name] for name in Manifest.__annotations__ if name in members}
    files = {
        name: FileRecord(int(each["size"]), str(each["digest"])) for name, each in members["files"].items()
    }
    for name in files:
        if not _FILE_NAME.match(name):  # a crafted name must not lead out of the folder
            raise ValueError(f"file name {name!r}")
    return Manifest(
        **{**known, "files": files, "world": {name: int(size) for name, size in members["world"].items()}}
    )
