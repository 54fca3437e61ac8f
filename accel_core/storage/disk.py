"""A folder on a disk."""

from __future__ import annotations

import errno
import os
import platform
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Final

try:
    import fcntl

    HAS_LOCKS = True
except ImportError:  # Windows: claims are judged by their age
    HAS_LOCKS = False

CLAIM: Final = "claim-"
"""Prefix of the names of claim files."""
CLAIM_SECONDS: Final = 24 * 3600.0
"""Age in seconds at which a claim expires if its lock cannot be tested."""
BEGIN_SECONDS = 10.0
"""Seconds between the creation of a folder or claim file and its lock; a slower save fails."""
LIST_SECONDS = 30.0
"""Seconds to retry the listing of a folder: a stale NFS handle is listed but never found."""
OPEN_FILES: Final = 64
"""Largest number of files open at once, per folder."""
_NOT_HERE: Final = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EINVAL)
"""Errors of file systems that do not support hard links."""
_held: Final[set[Path]] = set()
"""Claims of this process. On some systems a process that tests its own lock loses the lock."""


class Disk:
    """A folder on a disk: see `Storage`. `path` is absolute; `shared` says that all nodes see the folder."""

    def __init__(self, path: Path, *, shared: bool = True) -> None:
        self.path, self.shared = path, shared
        self._opened = lru_cache(OPEN_FILES)(partial(_Opened, path))

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Disk({self.path!r})"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    def at(self, name: str) -> Disk:
        """Return a folder inside this folder."""
        return Disk(self.path / name, shared=self.shared)

    def list(self) -> Mapping[str, int | None]:
        """Return name -> bytes of each regular file, None for other entries. Links are not followed."""
        deadline = time.monotonic() + LIST_SECONDS
        while True:
            try:
                with os.scandir(self.path) as entries:
                    return {each.name: _size(each) for each in entries}
            except (FileNotFoundError, NotADirectoryError) as error:
                if not self.path.exists():  # also if a parent of the folder is a file
                    return {}
                if isinstance(error, NotADirectoryError) or time.monotonic() > deadline:
                    raise
                # A file was removed during the listing, and its replacement may be missing: list again.
                time.sleep(0.001)

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a regular file; symbolic links and pipes are refused."""
        file = self._opened(name)
        while into:
            count = _read_at(file.handle, into, start)
            if not count:
                raise EOFError(f"it ends after {start} bytes")
            start, into = start + count, into[count:]

    def create(self, name: str, content: bytes) -> None:
        """Write and sync the file in a temporary folder, then hard-link it to `name`, which must be free."""
        beside = self.at(f"save-{secrets.token_hex(8)}")  # after a kill, removed like any save's folder
        with beside.claim():
            try:
                with beside.writer(name) as file:
                    file.write(content)
                try:
                    _name_once(beside.path / name, self.path / name, content)
                except FileExistsError:  # over NFS, our own request may be sent twice
                    if (self.path / name).read_bytes() != content:
                        raise
                self.sync()
            finally:
                beside.remove([name])

    @contextmanager
    def writer(self, name: str) -> Iterator[BinaryIO]:
        """Write a new file; the file and its folder entry are synced."""
        with (self.path / name).open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        self.sync()

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, then the folder if it is empty. Raises OSError if the folder is a symbolic link."""
        if self.path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, and what it leads to stays", str(self.path))
        for name in names:
            with suppress(FileNotFoundError, IsADirectoryError):  # no save makes a folder in here
                (self.path / name).unlink()
        with suppress(OSError):
            self.path.rmdir()

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Create the folder and a claim file in it, which this process locks if the file system has locks."""
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / f"{CLAIM}{secrets.token_hex(8)}"
        _held.add(path)
        try:
            with path.open("xb", buffering=0) as file:
                is_locked = _lock(file.fileno())
                file.write(f"{_boot() if is_locked else '-'} {platform.node()}\n".encode())
                yield
        finally:
            _held.discard(path)
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):
                self.path.rmdir()

    def is_claimed(self) -> bool:
        """Return True if a claim's lock is or may be held, or if the folder is too new to have a claim."""
        entries = self.list()
        if not entries:
            return _age(self.path) < BEGIN_SECONDS
        return any(_is_alive(self.path / name) for name in entries if name.startswith(CLAIM))

    def local_cache(self, nonce: str) -> Disk:
        """Return this folder."""
        del nonce
        return self

    def local(self, name: str) -> Path:
        """Return the file's path."""
        return self.path / name

    def fetch(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Sync the folder, so that its entries survive a power failure."""
        if os.name != "nt":  # Windows cannot open a folder
            handle = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


class _Opened:
    """A file for reading, closed when the object is deleted."""

    handle = -1

    def __init__(self, folder: Path, name: str) -> None:
        wanted = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")  # flags that the system lacks are skipped
        flags = sum((getattr(os, flag, 0) for flag in wanted), os.O_RDONLY)
        self.handle = os.open(folder / name, flags)
        if not S_ISREG(os.fstat(self.handle).st_mode):
            raise FileNotFoundError(errno.ENOENT, "it is not a file", str(folder / name))

    def __del__(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)


def _size(entry: os.DirEntry[str]) -> int | None:
    return entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else None


def _read_at(handle: int, into: memoryview, start: int) -> int:
    """Read into `into` from the offset `start` on; return the number of bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [into], start)
    os.lseek(handle, start, os.SEEK_SET)
    content = os.read(handle, len(into))
    into[: len(content)] = content
    return len(content)


def _name_once(source: Path, target: Path, content: bytes) -> None:
    """Create `target` as a hard link to `source`. Without hard links, write `content` to `target`."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        with target.open("xb") as file:  # not atomic: readers skip a manifest that is not whole
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _lock(handle: int) -> bool:
    """Lock a claim file; return False if the file system has no locks."""
    if not HAS_LOCKS:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True


def _is_alive(claim: Path) -> bool:
    """Return True if the process that made this claim may still be alive."""
    if claim in _held:
        return True
    try:
        with claim.open("rb") as file:
            boot, _, _ = file.read(1024).decode(errors="replace").partition(" ")
            if not boot:  # the process is about to write it
                return _age(claim) < BEGIN_SECONDS
            if HAS_LOCKS and boot == _boot():
                return _is_locked(file.fileno())
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return _age(claim) < CLAIM_SECONDS  # made on another machine, or without a lock


def _is_locked(handle: int) -> bool:
    """Return True if another process has locked the file. Raises OSError if locks are not supported."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False


def _age(path: Path) -> float:
    """Return the seconds since a file or folder was changed; infinity if the file is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def _boot() -> str:
    """Return the boot id, as locks show only processes of this boot; the host name if there is no boot id."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else platform.node()
