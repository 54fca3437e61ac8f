"""Files of a checkpoint: written once, hashed a block on the way, synced; read back verified.

manifest.json says what the checkpoint is, and is the proof that all of it is there.

Data files have the safetensors layout. The writer is our own because the library's can neither hash
while it writes nor sync what it wrote. Imports torch only to look into tensors.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen
from cattrs import Converter
from xxhash import xxh3_64, xxh3_64_hexdigest

from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DataFile", "FileRecord", "Manifest", "damaged", "is_ours", "read_manifest", "write_manifest"]

MANIFEST: Final = "manifest.json"
MANIFEST_BYTES: Final = 1 << 28
"""No manifest is larger: it has a line of some 100 bytes for each file."""
FORMAT: Final = "accel-checkpoint"
VERSION: Final = 1
_CONVERTER: Final = Converter(detailed_validation=False)
BLOCK_BYTES: Final = 4 << 20
_ALIGNMENT: Final = 64

_SAFETENSORS: Final[Mapping[str, str]] = {
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""What safetensors has a word for. The rest is bytes there, and its dtype in our index."""


@frozen
class FileRecord:
    """A file by size (bytes) and digest: the xxh3_64 of its blocks' xxh3_64, 8 bytes each."""

    size: int
    digest: str

    @classmethod
    def of(cls, size: int, blocks: Iterable[str]) -> FileRecord:
        return cls(size, xxh3_64_hexdigest(b"".join(map(bytes.fromhex, blocks))))


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[FileRecord, list[str]]:
    """Write and sync a new file. Returns its record and the digests of its blocks."""
    size, blocks, block = 0, [], xxh3_64()
    with path.open("xb") as file:
        for part in parts:
            left = memoryview(part)
            while left:
                now = left[: BLOCK_BYTES - size % BLOCK_BYTES]
                file.write(now)
                block.update(now)
                size, left = size + len(now), left[len(now) :]
                if size % BLOCK_BYTES == 0:
                    blocks.append(block.hexdigest())
                    block.reset()
        if size % BLOCK_BYTES:
            blocks.append(block.hexdigest())
        file.flush()
        os.fsync(file.fileno())
    return FileRecord.of(size, blocks), blocks


def as_json(value: Any) -> bytes:
    """A value as compact JSON text."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def lay_out(tensors: Iterable[tuple[str, Tensor]]) -> tuple[bytes, list[int]]:
    """The head of a data file of these named tensors, in this order, and where in the file each starts."""
    from accel_core.checkpoint.codec import name_of

    header: dict[str, Any] = {}
    starts = [0]
    for name, tensor in tensors:
        starts.append(starts[-1] + tensor.nbytes)
        known = _SAFETENSORS.get(name_of(tensor.dtype))
        shape = list(tensor.shape) if known else [tensor.nbytes]
        header[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": starts[-2:]}
    text = as_json(header)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + start for start in starts[:-1]]


class DataFile:
    """A file of a checkpoint that is being read, mapped into memory.

    Raises:
        CheckpointError: it is not a file of the recorded size.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        self.path, self.record = path, record
        if path.is_symlink() or not path.is_file() or path.stat().st_size != record.size:
            raise damaged(path, f"it is no file of {record.size} bytes")
        try:
            with path.open("rb") as file:
                # Copy on write: torch wants a writable buffer, and nothing ever writes.
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise damaged(path, f"it cannot be read ({error})") from error

    @property
    def blocks(self) -> range:
        """The numbers of its blocks."""
        return range(-(-self.record.size // BLOCK_BYTES))

    def block(self, number: int) -> str:
        """The digest of a block, as it is on the disk now."""
        with memoryview(self._memory) as view, view[number * BLOCK_BYTES :][:BLOCK_BYTES] as block:
            return xxh3_64_hexdigest(block)

    def check(self, blocks: Iterable[str]) -> None:
        """Raises CheckpointError if these are not the blocks that the manifest vouches for."""
        if FileRecord.of(self.record.size, blocks) != self.record:
            raise damaged(self.path, "its digest is not the one in the manifest")

    def json(self) -> Any:
        """The content of a JSON file, verified."""
        self.check(map(self.block, self.blocks))
        try:
            return json.loads(self._memory[:])
        except (ValueError, RecursionError) as error:
            raise damaged(self.path, f"it cannot be understood ({error!r})") from error

    def tensor(self, dtype: str, shape: Sequence[int], start: int) -> Tensor:
        """A tensor over the mapped bytes; read it, do not write it."""
        from accel_core.checkpoint.codec import tensor_from

        return tensor_from(self._memory, dtype, shape, start)


def sync_folder(path: Path) -> None:
    """Make the folder's entries survive a power cut."""
    if os.name != "nt":  # a folder cannot be opened there
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def damaged(path: Path, problem: str) -> CheckpointError:
    """What to raise for a file that is not what was written."""
    return CheckpointError(
        f"{path} is damaged: {problem}\nnothing was loaded; load another checkpoint, or restore this file",
        path=str(path),
    )


# -- the manifest --------------------------------------------------------------------------------


@frozen
class Manifest:
    """What a reader acts on; the rest is for people (docs/checkpoint-format.md)."""

    save_id: str
    run_id: str
    world: Mapping[str, int]
    files: Mapping[str, FileRecord]
    name: str | None
    """What this library named it; None where the user did."""
    iteration: int
    lineage: Sequence[str]
    domains: Sequence[Sequence[int]]
    """Where nodes have disks of their own: node -> the ranks whose files are there; else empty."""
    members: Mapping[str, Any]
    """All of it, as it stands there."""


def manifest_of(members: Mapping[str, Any]) -> bytes:
    """The manifest's content; its last line is a checksum of all bytes before it."""
    named = {"format": FORMAT, "version": VERSION, **members}
    text = json.dumps(named, indent=2, allow_nan=False, default=repr)
    return _sealed(text.removesuffix("\n}").encode())


def write_manifest(folder: Path, content: bytes) -> None:
    """Write and sync the manifest."""
    write_file(folder / MANIFEST, [content])


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked.

    Raises:
        CheckpointError: there is none, it is damaged, or of a version that is not known here.
    """
    path = folder / MANIFEST
    if not path.is_file():  # a pipe would make us wait
        raise CheckpointError(
            f"{folder} is no checkpoint: it has no {MANIFEST}\ngive the folder that save_state() returned",
            path=str(folder),
        )
    try:
        if path.stat().st_size > MANIFEST_BYTES:
            raise ValueError(f"it has more than {MANIFEST_BYTES} bytes")
        content = path.read_bytes()
        members = json.loads(content)
        if (members["format"], members["version"]) != (FORMAT, VERSION):
            raise CheckpointError(
                f"{path} is of format {members['format']} version {members['version']}\n"
                f"this accel-core reads {FORMAT} version {VERSION}; load it with the one that wrote it",
                path=str(path),
            )
        if content != _sealed(content[: -len(_sealed(b""))]):
            raise ValueError("its checksum does not fit its content")
        if outside := [name for name in members["files"] if Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} is no file in this folder")
        if min(members["world"]["size"], members["world"]["readers"]) < 1:
            raise ValueError("it is of a world without ranks")
        return _CONVERTER.structure({**members, "members": members}, Manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"it cannot be understood ({error!r})") from error


def manifest_if_any(folder: Path) -> Manifest | None:
    """The manifest, or None where `read_manifest` raises."""
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def is_ours(folder: Path) -> bool:
    """Whether some version of this format wrote the folder, damaged or not."""
    path = folder / MANIFEST
    try:
        return path.is_file() and bool(json.loads(path.read_bytes())["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _sealed(content: bytes) -> bytes:
    return content + f',\n  "checksum": "{xxh3_64_hexdigest(content)}"\n}}\n'.encode()
