"""Files of a checkpoint: written once, hashed per block on the way, and read back verified.

Data files have the safetensors layout. The writer is our own, as the library's cannot hash while it writes.
Imports torch only to look into tensors.
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
"""Bytes of a block that are read at a time to be hashed.

A core's own cache still holds so many when they are hashed.
"""
_DAMAGE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EIO)
"""Errors of a file that will not be read later either."""
_ALIGNMENT: Final = 64

_SAFETENSORS: Final[Mapping[str, str]] = {
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Dtypes that safetensors supports: torch's name -> its name.

Tensors of other dtypes are stored as bytes, with their dtype in our index.
"""


class DamagedError(CheckpointError):
    """A file of the checkpoint is not what was written."""


class UnreadableError(CheckpointError):
    """The checkpoint cannot be read now, and may be whole.

    No older one is taken instead.
    """


@frozen
class FileRecord:
    """Size (bytes) and digest of a file: xxh3_64 of its blocks' xxh3_64."""

    size: int
    digest: str

    @classmethod
    def of(cls, size: int, blocks: Iterable[str]) -> FileRecord:
        return cls(size, xxh3_64_hexdigest(b"".join(map(bytes.fromhex, blocks))))


@define
class Meter:
    """Bytes that were read or written so far."""

    count: int = 0


def write_file(
    file: Writer, parts: Iterable[bytes | memoryview], meter: Meter | None = None
) -> tuple[FileRecord, list[str]]:
    """Write a new file. Returns its record and the digests of its blocks."""
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
    """Return the head of a data file of these tensors, and each one's start in it."""
    from accel_core.storage.tensor_bytes import name_of

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


@define(eq=False)
class DataFile:
    """A file of a checkpoint that is being read.

    It is copied from, never mapped: a disk error in a mapped file ends the process.

    What is read was verified before: by `verify`, by another rank, or as it is read.

    home: the folder that it is in. meter: counts what is read. digests: of its blocks, once they are known.
    """

    home: Storage
    name: str
    record: FileRecord
    meter: Meter = field(factory=Meter)
    digests: Sequence[str] = ()
    verified: set[int] = field(factory=set)

    def __str__(self) -> str:
        return f"{self.home}/{self.name}"

    @property
    def blocks(self) -> range:
        """The numbers of its blocks."""
        return range(-(-self.record.size // BLOCK_BYTES))

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on.

        Raises:
            CheckpointError: they are damaged, or cannot be read.
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
        """Return the bytes of a block: only the last one may have less than all."""
        return min(BLOCK_BYTES, self.record.size - number * BLOCK_BYTES)

    def block(self, number: int, piece: memoryview) -> str:
        """Return the digest of a block, as it is now. piece: memory of `PIECE_BYTES` to read into."""
        digest, begin = xxh3_64(), number * BLOCK_BYTES
        end = begin + self.size_of(number)
        for start in range(begin, end, PIECE_BYTES):
            self._read(start, now := piece[: end - start])
            digest.update(now)
        return digest.hexdigest()

    def verify(self, blocks: Iterable[int]) -> None:
        """Bring blocks near and compare them with their digests, once. Raises CheckpointError."""
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
        """Take the digests of its blocks. Raises CheckpointError if they are not those of its record."""
        self.digests = [*blocks]
        if FileRecord.of(self.record.size, self.digests) != self.record:
            raise damaged(self, "its digest is not the one in the manifest")

    def content(self) -> bytes:
        """Return all bytes of a file that fits into memory, verified."""
        content = bytearray(self.record.size)
        self._read(0, whole := memoryview(content))
        self.check([xxh3_64_hexdigest(whole[number * BLOCK_BYTES :][:BLOCK_BYTES]) for number in self.blocks])
        return bytes(content)

    def tensor(self, dtype: str, shape: Sequence[int], start: int) -> Tensor:
        """Return a tensor of the bytes from `start` on, in memory of its own."""
        from accel_core.storage.tensor_bytes import bytes_within, tensor_from

        memory = bytearray(bytes_within(self.record.size, dtype, shape, start))
        self.read(start, memoryview(memory))
        return tensor_from(memory, dtype, shape)


def cannot_be_read(path: str, error: OSError | EOFError) -> CheckpointError:
    """Return the error for a file or folder that cannot be read: damage, or something that may pass."""
    if isinstance(error, EOFError) or error.errno in _DAMAGE or isinstance(error, FileNotFoundError):
        return damaged(path, f"it cannot be read ({error})")
    return UnreadableError(
        f"{path} cannot be read: {type(error).__name__}: {error}\n"
        "it may be whole, so no older one is taken instead; mend that, and load again",
        path=path,
    )


def listed(place: Storage) -> Mapping[str, int | None]:
    """List a folder. Raises UnreadableError."""
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
    """Return the error for a file that is not what was written."""
    return DamagedError(
        f"{path} is damaged: {problem}\nnothing was loaded; load another checkpoint, or restore this file",
        path=str(path),
    )


@contextmanager
def malformed_as_damaged(path: object, *, calls_plugins: bool = False) -> Iterator[None]:
    """Report malformed JSON as a damaged file.

    calls_plugins: errors that other code than ours raises inside stay what they are.

    Raises:
        CheckpointError: something else is written there than a save writes.
    """
    try:
        yield
    except CheckpointError:  # some are RuntimeErrors too
        raise
    except (AttributeError, LookupError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        if calls_plugins and not module_that_raised(error).startswith(_OURS):
            raise
        raise damaged(path, f"it cannot be understood ({error!r})") from error


_OURS: Final = ("accel_core.checkpoint.", "accel_core.storage.")
