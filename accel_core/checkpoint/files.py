"""Files of a checkpoint: written once, hashed per block on the way, synced.

Read back verified.

Data files have the safetensors layout. The writer is our own because the library's can neither hash
while it writes nor sync what it wrote. Imports torch only to look into tensors.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import ref

from attrs import frozen
from xxhash import xxh3_64, xxh3_64_hexdigest

from accel_core.checkpoint.stored import Place, StoredPath, UnreadableError
from accel_core.errors import CheckpointError, module_that_raised

if TYPE_CHECKING:
    from torch import Tensor

    from accel_core.checkpoint.node_copy import NodeCopy

BLOCK_BYTES: Final = 4 << 20
FETCHED_BLOCKS: Final = 4
"""Largest number of blocks that are asked of a store by one request."""
OPEN_FILES: Final = 64
"""Largest number of data files that are open at once.

A checkpoint of many ranks has more files than a process may open.
"""
PIECE_BYTES: Final = 1 << 19
"""Bytes of a block that are read at a time to be hashed.

A core's own cache still holds so many when they are hashed.
"""
_memory: Final = threading.local()
"""The buffer `piece` of each thread, which it reads into."""
_seeking: Final = threading.Lock()
"""Held while a handle is moved and read, on systems that read nowhere else."""
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


@frozen
class FileRecord:
    """Size (bytes) and digest of a file: xxh3_64 of its blocks' xxh3_64."""

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
    """Return a value as compact JSON text."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def lay_out(tensors: Iterable[tuple[str, Tensor]]) -> tuple[bytes, list[int]]:
    """Return the head of a data file of these tensors, and each one's start in it."""
    from accel_core.distributed.tensor_bytes import name_of

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
    """A file of a checkpoint that is being read.

    It is copied from, never mapped: a disk error in a mapped file ends the process. What a store has of it
    is read from `node_copy`: each block comes once, and is compared with its digest.

    Raises:
        CheckpointError: it is not a file of the recorded size, or cannot be read.
    """

    bytes_read: ClassVar[int] = 0
    """Read by this process so far, of all data files."""
    _open: ClassVar[deque[ref[DataFile]]] = deque()
    """The data files that are open, the oldest first."""

    def __init__(self, path: Place, record: FileRecord, node_copy: NodeCopy | None = None) -> None:
        self.path, self.record, self.node_copy = path, record, node_copy
        self.fetched: set[int] = set()
        """Numbers of the blocks that are in the copy."""
        self._handle: int | None = None
        self._identity: tuple[int, ...] | None = None
        self._digests: Sequence[str] = ()
        if not isinstance(path, StoredPath):
            self._opened(path)
        elif path.size != record.size:
            found = "it is not there" if path.size is None else f"it is not a file of {record.size} bytes"
            raise damaged(path, found)

    @property
    def blocks(self) -> range:
        """The numbers of its blocks."""
        return range(-(-self.record.size // BLOCK_BYTES))

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on.

        Raises:
            CheckpointError: they are not there, or cannot be read.
        """
        path = self.path
        if isinstance(path, StoredPath):
            if self.node_copy is None or not self._digests:  # of a small file
                into[:] = self._asked(path, start, len(into))
                DataFile.bytes_read += len(into)
                return
            self.fetch(range(start // BLOCK_BYTES, -(-(start + len(into)) // BLOCK_BYTES)))
            path = self.node_copy.folder / path.name
        while into:
            try:
                count = _read_at(self._opened(path), into, start)
            except OSError as error:
                raise cannot_be_read(path, error) from error
            if not count:
                raise damaged(path, f"it ends after {start} bytes")
            start, into = start + count, into[count:]
            DataFile.bytes_read += count

    def fetch(self, blocks: Iterable[int]) -> None:
        """Bring blocks from a store into the copy, those that are not there.

        From any thread.

        Raises:
            CheckpointError: a block is not what was written, or cannot be had or kept.
        """
        path, copy = self.path, self.node_copy
        assert isinstance(path, StoredPath)
        assert copy is not None
        missing = enumerate(number for number in blocks if number not in self.fetched)
        for _, group in groupby(missing, lambda each: (each[1] // FETCHED_BLOCKS, each[1] - each[0])):
            numbers = [number for _, number in group]
            start = numbers[0] * BLOCK_BYTES
            content = memoryview(self._asked(path, start, sum(map(self.size_of, numbers))))
            for number in numbers:
                if (
                    xxh3_64_hexdigest(content[number * BLOCK_BYTES - start :][:BLOCK_BYTES])
                    != self._digests[number]
                ):
                    raise damaged(path, f"block {number} is not what was written")
            copy.keep(path.name, start, content)
            self.fetched.update(numbers)
            DataFile.bytes_read += len(content)

    def _asked(self, path: StoredPath, start: int, size: int) -> bytes:
        try:
            return path.read(start, size)
        except FileNotFoundError as error:
            raise not_found(path, error) from error

    @classmethod
    def measured(cls, total: int) -> Callable[[], tuple[int, int]]:
        """Return a measure, as `show_progress` takes it, of reading from now on."""
        before = cls.bytes_read
        return lambda: (cls.bytes_read - before, total)

    def block(self, number: int) -> str:
        """Return the digest of a block, as it is on the disk now."""
        if not hasattr(_memory, "piece"):
            _memory.piece = memoryview(bytearray(PIECE_BYTES))
        digest, begin = xxh3_64(), number * BLOCK_BYTES
        end = begin + self.size_of(number)
        for start in range(begin, end, PIECE_BYTES):
            self.read(start, piece := _memory.piece[: end - start])
            digest.update(piece)
        return digest.hexdigest()

    def size_of(self, number: int) -> int:
        """Return the bytes of a block: only the last one may have less than all."""
        return min(BLOCK_BYTES, self.record.size - number * BLOCK_BYTES)

    def check(self, blocks: Iterable[str]) -> None:
        """Raise CheckpointError if these are not the blocks of the manifest."""
        self._digests = [*blocks]
        if FileRecord.of(self.record.size, self._digests) != self.record:
            raise damaged(self.path, "its digest is not the one in the manifest")

    def json(self) -> Any:
        """Return the content of a JSON file, verified."""
        content = bytearray(self.record.size)
        self.read(0, whole := memoryview(content))
        self.check([xxh3_64_hexdigest(whole[number * BLOCK_BYTES :][:BLOCK_BYTES]) for number in self.blocks])
        with understanding(self.path):
            return json.loads(content)

    def tensor(self, dtype: str, shape: Sequence[int], start: int) -> Tensor:
        """Return a tensor of the bytes from `start` on, in memory of its own."""
        from accel_core.distributed.tensor_bytes import bytes_within, tensor_from

        memory = bytearray(bytes_within(self.record.size, dtype, shape, start))
        self.read(start, memoryview(memory))
        return tensor_from(memory, dtype, shape)

    def _opened(self, path: Path) -> int:
        if self._handle is None:
            self._handle = open_file(path)
            found = os.fstat(self._handle)
            identity = found.st_dev, found.st_ino, 0 if self.node_copy else found.st_mtime_ns
            if not S_ISREG(found.st_mode) or found.st_size != self.record.size:
                raise damaged(path, f"it is not a file of {self.record.size} bytes")
            if identity != (self._identity or identity):
                raise damaged(path, "it was replaced while it was read")
            self._identity = identity
            self._open.append(ref(self))
            if len(self._open) > OPEN_FILES and (first := self._open.popleft()()):
                first._close()
        return self._handle

    def _close(self) -> None:
        # Forgotten first: one that Ctrl-C keeps here would be closed again, when it is another file's.
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __del__(self) -> None:
        self._close()


def open_file(path: Path) -> int:
    """Return a handle to read from; follows no symbolic link and waits for no pipe."""
    try:
        wanted = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")  # as far as the system has them
        return os.open(path, sum((getattr(os, flag, 0) for flag in wanted), os.O_RDONLY))
    except OSError as error:
        raise cannot_be_read(path, error) from error


def _read_at(handle: int, into: memoryview, start: int) -> int:
    """Read from this place on; how many bytes came."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [into], start)
    with _seeking:  # Windows reads only where a handle stands, which threads share
        os.lseek(handle, start, os.SEEK_SET)
        content = os.read(handle, len(into))
    into[: len(content)] = content
    return len(content)


def cannot_be_read(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that the system does not let us read."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EIO):
        return damaged(path, f"it cannot be read ({error})")
    return UnreadableError(
        f"{path} cannot be read: {error}\n"
        "it may be whole, so no other is taken instead; mend that, and load again",
        path=str(path),
    )


def sync_folder(path: Path) -> None:
    """Make the folder's entries survive a power cut."""
    if os.name != "nt":  # a folder cannot be opened there
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def not_found(path: StoredPath, error: FileNotFoundError) -> CheckpointError:
    """Return the error for a file that the store has listed and does not find.

    It is lost if it is not listed any more. Else the store may find it later.
    """
    if path.name in path.parent.entries:
        return path.cannot_be_reached(error)
    return damaged(path, "it is not there any more")


def damaged(path: Place, problem: str) -> CheckpointError:
    """Return the error for a file that is not what was written."""
    return CheckpointError(
        f"{path} is damaged: {problem}\nnothing was loaded; load another checkpoint, or restore this file",
        path=str(path),
    )


@contextmanager
def understanding(path: Place, *, calls_plugins: bool = False) -> Iterator[None]:
    """Around code that takes a checkpoint's JSON at its word.

    calls_plugins: errors that other code than ours raises inside stay what they are.

    Raises:
        CheckpointError: something else is written there than a save writes.
    """
    try:
        yield
    except CheckpointError:  # some are RuntimeErrors too
        raise
    except (AttributeError, LookupError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        if calls_plugins and not module_that_raised(error).startswith("accel_core.checkpoint."):
            raise
        raise damaged(path, f"it cannot be understood ({error!r})") from error
