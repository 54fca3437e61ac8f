"""manifest.json: what a checkpoint is, and the proof that all of it is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen
from cattrs import Converter
from xxhash import xxh3_64_hexdigest

from accel_core.checkpoint.files import FileRecord, damaged, write_file
from accel_core.errors import CheckpointError

__all__ = ["MANIFEST", "Manifest", "is_ours", "read_manifest", "write_manifest"]

MANIFEST: Final = "manifest.json"
FORMAT: Final = "accel-checkpoint"
VERSION: Final = 1
_CONVERTER: Final = Converter(detailed_validation=False)


@frozen
class Manifest:
    """What a reader acts on; the rest is for people (docs/checkpoint-format.md)."""

    save_id: str
    run_id: str
    world: Mapping[str, int]
    files: Mapping[str, FileRecord]


def write_manifest(folder: Path, members: Mapping[str, Any]) -> None:
    """Write and sync the manifest; its last line is a checksum of all bytes before it."""
    named = {"format": FORMAT, "version": VERSION, **members}
    text = json.dumps(named, indent=2, allow_nan=False, default=repr)
    write_file(folder / MANIFEST, [_sealed(text.removesuffix("\n}").encode())])


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked.

    Raises:
        CheckpointError: there is none, it is damaged, or of a version that is not known here.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} is no checkpoint: it has no {MANIFEST}\ngive the folder that save_state() returned",
            path=str(folder),
        ) from error
    try:
        members = json.loads(content)
        if (members["format"], members["version"]) != (FORMAT, VERSION):
            raise CheckpointError(
                f"{path} is of format {members['format']} version {members['version']}\n"
                f"this accel-core reads {FORMAT} version {VERSION}; load it with the one that wrote it",
                path=str(path),
            )
        if content != _sealed(content[: -len(_sealed(b""))]):
            raise ValueError("its checksum does not fit its content")
        return _CONVERTER.structure(members, Manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"it cannot be understood ({error!r})") from error


def is_ours(folder: Path) -> bool:
    """Whether some version of this format wrote the folder, damaged or not."""
    try:
        return bool(json.loads((folder / MANIFEST).read_bytes())["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sealed(content: bytes) -> bytes:
    return content + f',\n  "checksum": "{xxh3_64_hexdigest(content)}"\n}}\n'.encode()
