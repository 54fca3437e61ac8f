"""Files of a checkpoint: written once, hashed a block on the way, synced; read back verified.

Data files have the safetensors layout. The writer is our own because the library's can neither hash
while it writes nor sync what it wrote.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen
from xxhash import xxh3_64_hexdigest

from accel_core.checkpoint.codec import DTYPES, name_of
from accel_core.checkpoint.memory import bytes_of, tensor_from
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

__all__ = ["BLOCK_BYTES", "DataFile", "FileRecord", "sync_folder", "write_data", "write_json"]

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
        return cls(size, xxh3_64_hexdigest(b"".join(bytes.fromhex(block) for block in blocks)))

    def check(self, path: Path, blocks: Iterable[str]) -> None:
        """Raises CheckpointError if these are not the blocks of this file."""
        if self.of(self.size, blocks) != self:
            raise damaged(path, f"its digest is not {self.digest}, as the checkpoint's manifest says")


class BlockWriter:
    """A new file, its blocks hashed while they are written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._pending = bytearray()
        self.size = 0
        self.blocks: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                if self._pending:
                    self._emit(self._pending)
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            take = BLOCK_BYTES - len(self._pending)
            if take == BLOCK_BYTES and len(view) >= take:  # whole blocks are not copied
                self._emit(view[:take])
            else:
                self._pending += view[:take]
                if len(self._pending) == BLOCK_BYTES:
                    self._emit(self._pending)
                    self._pending = bytearray()
            view = view[take:]

    def _emit(self, block: bytearray | memoryview) -> None:
        self._file.write(block)
        self.blocks.append(xxh3_64_hexdigest(block))
        self.size += len(block)

    @property
    def record(self) -> FileRecord:
        return FileRecord.of(self.size, self.blocks)


def write_json(path: Path, value: Any) -> FileRecord:
    """Write and sync a JSON file."""
    with BlockWriter(path) as file:
        file.write(json.dumps(value, separators=(",", ":"), allow_nan=False).encode())
    return file.record


def write_data(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> tuple[FileRecord, list[str], list[int]]:
    """Write and sync a data file of named tensors.

    Returns the file's record, its blocks' digests, and where in the file each tensor starts.
    """
    # Larger items first, so that every tensor is aligned to its own item size.
    order = sorted(range(len(tensors)), key=lambda number: -tensors[number][1].dtype.itemsize)
    header: dict[str, Any] = {}
    starts = [0] * len(tensors)
    end = 0
    for number in order:
        name, tensor = tensors[number]
        starts[number], end = end, end + tensor.nbytes
        known = _SAFETENSORS.get(name_of(tensor.dtype))
        shape = list(tensor.shape) if known else [tensor.nbytes]
        header[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [starts[number], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with BlockWriter(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number in order:
            file.write(bytes_of(tensors[number][1]))
    return file.record, file.blocks, [8 + len(text) + start for start in starts]


class DataFile:
    """A file of a checkpoint that is being read, mapped into memory."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        self.path = path
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise damaged(path, f"it cannot be opened ({error.strerror})") from error
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise damaged(path, "it is not a file")
            if found.st_size != record.size:
                raise damaged(path, f"it has {found.st_size} bytes, and should have {record.size}")
            # Copy on write: torch wants a writable buffer, and nothing ever writes.
            self._memory: Any = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY) if record.size else bytearray()
        finally:
            os.close(handle)

    def block(self, number: int) -> str:
        """The digest of a block, as it is on the disk now."""
        with (
            memoryview(self._memory) as view,
            view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] as block,
        ):
            return xxh3_64_hexdigest(block)

    def content(self, record: FileRecord) -> bytes:
        """The whole content, verified."""
        record.check(self.path, [self.block(number) for number in range(-(-record.size // BLOCK_BYTES))])
        return bytes(self._memory)

    def tensor(self, dtype: str, shape: Sequence[int], start: int) -> Tensor:
        """A tensor over the mapped bytes; read it, do not write it."""
        try:
            return tensor_from(self._memory, DTYPES[dtype], shape, start)
        except (KeyError, ValueError) as error:
            raise damaged(
                self.path, f"its index points at no {dtype} tensor of shape {list(shape)}"
            ) from error


def sync_folder(path: Path) -> None:
    """Make the folder's entries survive a power cut."""
    if os.name == "nt":  # a folder cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: {problem}\nnothing was loaded; load another checkpoint, or restore this file",
        path=str(path),
    )
