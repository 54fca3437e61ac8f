"""Files of a checkpoint: written once, hashed per block while they are written, and verified when read.

Data files have the safetensors layout. The writer is our own: the safetensors library cannot hash while it
writes. This module imports torch only for functions that handle tensors.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field, frozen
from xxhash import xxh3_64, xxh3_64_hexdigest

from accel_core.errors import CheckpointError, module_that_raised

if TYPE_CHECKING:
    from torch import Tensor

    from accel_core.storage.protocols import Storage, Writer

BLOCK_BYTES: Final = 4 << 20
PIECE_BYTES: Final = 1 << 19
"""Bytes that are read and hashed at a time: this many stay in a CPU core's cache between read and hash."""
_DAMAGE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EIO)
"""OS errors that are permanent: a later read of the file will fail too."""
_ALIGNMENT: Final = 64

_SAFETENSORS: Final[Mapping[str, str]] = {
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Dtypes that safetensors supports: torch's name -> safetensors' name.

Tensors of other dtypes are stored as bytes, with their dtype in our index.
"""


class DamagedError(CheckpointError):
    """A file of the checkpoint is missing, or differs from the bytes that were written."""


class UnreadableError(CheckpointError):
    """The checkpoint cannot be read now, but may be whole; no older checkpoint is loaded instead."""


@frozen
class FileRecord:
    """Size in bytes and digest of a file; the digest is the xxh3_64 of the blocks' xxh3_64 digests."""

    size: int
    digest: str

    @classmethod
    def of(cls, size: int, blocks: Iterable[str]) -> FileRecord:
        return cls(size, xxh3_64_hexdigest(b"".join(map(bytes.fromhex, blocks))))


@define
class Meter:
    """A counter of the bytes read or written so far."""

    count: int = 0


def write_file(
    file: Writer, parts: Iterable[bytes | memoryview], meter: Meter | None = None
) -> tuple[FileRecord, list[str]]:
    """Write a new file; return its record and the digests of its blocks."""
    size, blocks, block, written = 0, list[str](), xxh3_64(), meter or Meter()
    for part in parts:
        left = memoryview(part)
        while left:
            now = left[: BLOCK_BYTES - size % BLOCK_BYTES]
            file.write(now)
            block.update(now)
            size, left = size + len(now), left[len(now) :]
            written.count += len(now)
            if size % BLOCK_BYTES == 0:
                blocks.append(block.hexdigest())
                block.reset()
    if size % BLOCK_BYTES:
        blocks.append(block.hexdigest())
    return FileRecord.of(size, blocks), blocks


def as_json(value: Any) -> bytes:
    """Return a value as compact JSON text."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def lay_out(tensors: Iterable[tuple[str, Tensor]]) -> tuple[bytes, list[int]]:
    """Return the header of a data file with these tensors, and the start of each tensor in the file."""
    from accel_core.storage.tensor_bytes import name_of

    header: dict[str, Any] = {}
    starts = [0]
    for name, tensor in tensors:
        starts.append(starts[-1] + tensor.nbytes)
        known = _SAFETENSORS.get(name_of(tensor.dtype))
        shape = list(tensor.shape) if known else [tensor.nbytes]
        header[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": starts[-2:]}
    text = as_json(header)
    # Pad the header, so that readers which map the file get aligned tensors.
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + start for start in starts[:-1]]


@define(eq=False)
class DataFile:
    """A file of a checkpoint that is being read.

    The file is copied, never memory-mapped: a disk error in a mapped file ends the process. All bytes are
    verified before they are returned: by `verify`, by another rank, or by the read itself.
    """

    home: Storage
    """Folder of the file."""
    name: str
    record: FileRecord
    meter: Meter = field(factory=Meter)
    """Counts the bytes read."""
    digests: Sequence[str] = ()
    """Digests of the blocks, set by `check`."""
    verified: set[int] = field(factory=set)
    """Numbers of the blocks that are verified."""

    def __str__(self) -> str:
        return f"{self.home}/{self.name}"

    @property
    def blocks(self) -> range:
        """The numbers of the file's blocks."""
        return range(-(-self.record.size // BLOCK_BYTES))

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on.

        Raises:
            CheckpointError: the bytes are damaged, or cannot be read.
        """
        blocks = range(start // BLOCK_BYTES, -(-(start + len(into)) // BLOCK_BYTES))
        if not self.verified.issuperset(blocks):
            self.verify(blocks)
        self._read(start, into)

    def _read(self, start: int, into: memoryview) -> None:
        try:
            self.home.read(self.name, start, into)
        except (OSError, EOFError) as error:
            raise cannot_be_read(str(self), error) from error
        self.meter.count += len(into)

    def size_of(self, number: int) -> int:
        """Return the size in bytes of a block; only the last block may be shorter than `BLOCK_BYTES`."""
        return min(BLOCK_BYTES, self.record.size - number * BLOCK_BYTES)

    def block(self, number: int, piece: memoryview) -> str:
        """Read a block, by way of the buffer `piece` of `PIECE_BYTES`, and return its digest."""
        digest, begin = xxh3_64(), number * BLOCK_BYTES
        end = begin + self.size_of(number)
        for start in range(begin, end, PIECE_BYTES):
            self._read(start, now := piece[: end - start])
            digest.update(now)
        return digest.hexdigest()

    def verify(self, blocks: Iterable[int]) -> None:
        """Fetch blocks and compare them with their digests, once per block. Raises CheckpointError."""
        numbers = [number for number in blocks if number not in self.verified]
        try:
            self.home.fetch(self.name, [(number * BLOCK_BYTES, self.size_of(number)) for number in numbers])
        except OSError as error:
            raise cannot_be_read(str(self), error) from error
        piece = memoryview(bytearray(PIECE_BYTES))
        for number in numbers:
            if self.block(number, piece) != self.digests[number]:
                raise damaged(self, f"block {number} is not what was written")
            self.verified.add(number)

    def check(self, blocks: Iterable[str]) -> None:
        """Set the digests of the blocks. Raises CheckpointError if they do not match the file's record."""
        self.digests = [*blocks]
        if FileRecord.of(self.record.size, self.digests) != self.record:
            raise damaged(self, "its digest is not the one in the manifest")

    def content(self) -> bytes:
        """Return all bytes of the file, verified. The file must fit into memory."""
        content = bytearray(self.record.size)
        self._read(0, whole := memoryview(content))
        self.check([xxh3_64_hexdigest(whole[number * BLOCK_BYTES :][:BLOCK_BYTES]) for number in self.blocks])
        return bytes(content)

    def tensor(self, dtype: str, shape: Sequence[int], start: int) -> Tensor:
        """Return a new tensor with the bytes from `start` on."""
        from accel_core.storage.tensor_bytes import bytes_within, tensor_from

        memory = bytearray(bytes_within(self.record.size, dtype, shape, start))
        self.read(start, memoryview(memory))
        return tensor_from(memory, dtype, shape)


def cannot_be_read(path: str, error: OSError | EOFError) -> CheckpointError:
    """Return the error for a file or folder that cannot be read: a DamagedError if that is permanent."""
    if isinstance(error, EOFError) or error.errno in _DAMAGE or isinstance(error, FileNotFoundError):
        return damaged(path, f"it cannot be read ({error})")
    return UnreadableError(
        f"{path} cannot be read: {type(error).__name__}: {error}\n"
        "it may be whole, so no older one is taken instead; mend that, and load again",
        path=path,
    )


def listed(place: Storage) -> Mapping[str, int | None]:
    """Return the entries of a folder, as `Storage.list` does. Raises UnreadableError."""
    try:
        return place.list()
    except OSError as error:
        raise UnreadableError(
            f"{place} cannot be reached: {type(error).__name__}: {error}\n"
            "check the name, and that this process may use it; nothing was changed, and no older checkpoint"
            " is taken instead",
            path=str(place),
        ) from error


def damaged(path: object, problem: str) -> DamagedError:
    """Return the error for a file whose content differs from the bytes that were written."""
    return DamagedError(
        f"{path} is damaged: {problem}\nnothing was loaded; load another checkpoint, or restore this file",
        path=str(path),
    )


@contextmanager
def malformed_as_damaged(path: object, *, calls_plugins: bool = False) -> Iterator[None]:
    """Turn errors from malformed JSON inside the context into a DamagedError.

    Args:
        path: the file, for the message.
        calls_plugins: the context calls plugins; an error that a plugin raises is not converted.

    Raises:
        CheckpointError: the content is not as a save writes it.
    """
    try:
        yield
    except CheckpointError:  # some subclasses are RuntimeErrors too
        raise
    except (AttributeError, LookupError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        if calls_plugins and not module_that_raised(error).startswith(_OURS):
            raise
        raise damaged(path, f"it cannot be understood ({error!r})") from error


_OURS: Final = ("accel_core.checkpoint.", "accel_core.storage.")
