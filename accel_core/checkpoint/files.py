"""Files of a checkpoint: written once, hashed a block on the way, synced; read back verified.

manifest.json says what the checkpoint is, and is the proof that all of it is there.

Data files have the safetensors layout. The writer is our own because the library's can neither hash
while it writes nor sync what it wrote. Imports torch only to look into tensors.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import ref

from attrs import frozen
from cattrs import Converter
from xxhash import xxh3_64, xxh3_64_hexdigest

from accel_core.errors import CheckpointError, module_that_raised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DataFile",
    "FileRecord",
    "Manifest",
    "UnreadableError",
    "damaged",
    "is_ours",
    "read_manifest",
    "write_manifest",
]

MANIFEST: Final = "manifest.json"
MANIFEST_BYTES: Final = 1 << 28
"""No manifest is larger: it has a line of some 100 bytes for each file."""
FORMAT: Final = "accel-checkpoint"
VERSION: Final = 1
_CONVERTER: Final = Converter(detailed_validation=False)
BLOCK_BYTES: Final = 4 << 20
OPEN_FILES: Final = 64
"""How many data files are held open: a checkpoint of many ranks has more than a process may open."""
_memory: Final = threading.local()
"""Of each thread, the `block` that it reads into."""
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


class UnreadableError(CheckpointError):
    """It cannot be read here and now, and may be whole: no older checkpoint is taken instead."""


class DataFile:
    """A file of a checkpoint that is being read. Copied from, never mapped: of a mapped file, what the
    disk cannot read ends the process.

    Raises:
        CheckpointError: it is not a file of the recorded size, or cannot be read.
    """

    _open: ClassVar[deque[ref[DataFile]]] = deque()
    """Those that are open."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        self.path, self.record = path, record
        self._handle: int | None = None
        self._identity: tuple[int, ...] | None = None
        self._opened()

    @property
    def blocks(self) -> range:
        """The numbers of its blocks."""
        return range(-(-self.record.size // BLOCK_BYTES))

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on.

        Raises:
            CheckpointError: they are not there, or cannot be read.
        """
        while into:
            try:
                count = _read_at(self._opened(), into, start)
            except OSError as error:
                raise _failed(self.path, error) from error
            if not count:
                raise damaged(self.path, f"it ends after {start} bytes")
            start, into = start + count, into[count:]

    def block(self, number: int) -> str:
        """The digest of a block, as it is on the disk now."""
        start = number * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.record.size - start)
        if not hasattr(_memory, "block"):
            _memory.block = memoryview(bytearray(BLOCK_BYTES))
        self.read(start, block := _memory.block[:size])
        return xxh3_64_hexdigest(block)

    def check(self, blocks: Iterable[str]) -> None:
        """Raises CheckpointError if these are not the blocks that the manifest vouches for."""
        if FileRecord.of(self.record.size, blocks) != self.record:
            raise damaged(self.path, "its digest is not the one in the manifest")

    def json(self) -> Any:
        """The content of a JSON file, verified."""
        content = bytearray(self.record.size)
        self.read(0, whole := memoryview(content))
        self.check([xxh3_64_hexdigest(whole[number * BLOCK_BYTES :][:BLOCK_BYTES]) for number in self.blocks])
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise damaged(self.path, f"it cannot be understood ({error!r})") from error

    def tensor(self, dtype: str, shape: Sequence[int], start: int) -> Tensor:
        """A tensor of the bytes from `start` on, in memory of its own."""
        from accel_core.distributed.tensor_bytes import bytes_within, tensor_from

        memory = bytearray(bytes_within(self.record.size, dtype, shape, start))
        self.read(start, memoryview(memory))
        return tensor_from(memory, dtype, shape)

    def _opened(self) -> int:
        if self._handle is None:
            self._handle = _open_file(self.path)
            found = os.fstat(self._handle)
            identity = found.st_dev, found.st_ino, found.st_mtime_ns
            if not S_ISREG(found.st_mode) or found.st_size != self.record.size:
                raise damaged(self.path, f"it is no file of {self.record.size} bytes")
            if identity != (self._identity or identity):
                raise damaged(self.path, "it was replaced while it was read")
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


def _open_file(path: Path) -> int:
    """A handle to read from; follows no symbolic link and waits for no pipe."""
    try:
        wanted = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")  # as far as the system has them
        return os.open(path, sum((getattr(os, flag, 0) for flag in wanted), os.O_RDONLY))
    except OSError as error:
        raise _failed(path, error) from error


def _read_at(handle: int, into: memoryview, start: int) -> int:
    """Read from this place on; how many bytes came."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [into], start)
    with _seeking:  # Windows reads only where a handle stands, which threads share
        os.lseek(handle, start, os.SEEK_SET)
        content = os.read(handle, len(into))
    into[: len(content)] = content
    return len(content)


def _failed(path: Path, error: OSError) -> CheckpointError:
    """What to raise for a file that the system does not let us read."""
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


def damaged(path: Path, problem: str) -> CheckpointError:
    """What to raise for a file that is not what was written."""
    return CheckpointError(
        f"{path} is damaged: {problem}\nnothing was loaded; load another checkpoint, or restore this file",
        path=str(path),
    )


@contextmanager
def understanding(path: Path) -> Iterator[None]:
    """Around what takes a checkpoint's JSON at its word, and calls plugins, whose errors stay theirs.

    Raises:
        CheckpointError: our own code found something else than is written there by a save.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if not module_that_raised(error).startswith("accel_core.checkpoint."):
            raise
        raise damaged(path, f"it cannot be understood ({error!r})") from error


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
    if not os.path.lexists(path):
        raise CheckpointError(
            f"{folder} is no checkpoint: it has no {MANIFEST}\ngive the folder that save_state() returned",
            path=str(folder),
        )
    content = _content(path)
    try:
        members = json.loads(content, parse_constant=_no_number)
        if (members["format"], members["version"]) != (FORMAT, VERSION):
            raise UnreadableError(
                f"{path} is of format {members['format']} version {members['version']}\n"
                f"this accel-core reads {FORMAT} version {VERSION}; load it with the one that wrote it",
                path=str(path),
            )
        if content != _sealed(content[: -len(_sealed(b""))]):
            raise ValueError("its checksum does not fit its content")
        if outside := [name for name in members["files"] if Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} is no file in this folder")
        size, readers = members["world"]["size"], members["world"]["readers"]
        if not (1 <= size <= len(members["files"]) and readers >= 1):
            raise ValueError(f"it is of a world of {size} ranks and {readers} readers")
        return _CONVERTER.structure({**members, "members": members}, Manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise damaged(path, f"it cannot be understood ({error!r})") from error


def _content(path: Path) -> bytes:
    """All of a manifest. Raises CheckpointError."""
    handle = _open_file(path)
    try:
        found = os.fstat(handle)
        if not S_ISREG(found.st_mode) or found.st_size > MANIFEST_BYTES:
            raise damaged(path, f"it is no file of at most {MANIFEST_BYTES} bytes")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise _failed(path, error) from error
    finally:
        os.close(handle)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def manifest_if_any(folder: Path) -> Manifest | None:
    """The manifest, or None where `read_manifest` raises."""
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def is_ours(folder: Path) -> bool:
    """Whether some version of this format wrote the folder, damaged or not."""
    try:
        return bool(json.loads(_content(folder / MANIFEST))["format"] == FORMAT)
    except (CheckpointError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _sealed(content: bytes) -> bytes:
    return content + f',\n  "checksum": "{xxh3_64_hexdigest(content)}"\n}}\n'.encode()
