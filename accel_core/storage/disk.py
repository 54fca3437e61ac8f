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
"""Start of the name of a claim's file."""
CLAIM_SECONDS: Final = 24 * 3600.0
"""Age from which a claim counts for nothing where its lock cannot be asked."""
BEGIN_SECONDS = 10.0
"""Time that a process has from making a folder or a claim's file to locking it: then its save fails."""
LIST_SECONDS = 30.0
"""Time for a folder to be listed: an entry may be listed and never found, as of a stale NFS handle."""
OPEN_FILES: Final = 64
"""Largest number of files of a folder that are open at once."""
_NOT_HERE: Final = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EINVAL)
"""Errors by which file systems say that they have no links."""
_held: Final[set[Path]] = set()
"""Claims of this process: on some systems a lock is lost when its own process looks at it."""


class Disk:
    """See `Storage`. path: absolute. shared: all nodes see it."""

    def __init__(self, path: Path, *, shared: bool = True) -> None:
        self.path, self.shared = path, shared
        self._opened = lru_cache(OPEN_FILES)(partial(_Opened, path))

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Disk({self.path!r})"

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.name

    def at(self, name: str) -> Disk:
        """Return a folder in it."""
        return Disk(self.path / name, shared=self.shared)

    def list(self) -> Mapping[str, int | None]:
        """Return name -> bytes of each regular file, None of all else: links are not followed."""
        deadline = time.monotonic() + LIST_SECONDS
        while True:
            try:
                with os.scandir(self.path) as entries:
                    return {each.name: _size(each) for each in entries}
            except (FileNotFoundError, NotADirectoryError) as error:
                if not self.path.exists():  # also where a folder above it is a file
                    return {}
                if isinstance(error, NotADirectoryError) or time.monotonic() > deadline:
                    raise
                # A file was removed since, and what replaces it may not be listed: look again.
                time.sleep(0.001)

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into`; follows no symbolic link and waits for no pipe."""
        file = self._opened(name)
        while into:
            count = _read_at(file.handle, into, start)
            if not count:
                raise EOFError(f"it ends after {start} bytes")
            start, into = start + count, into[count:]

    def create(self, name: str, content: bytes) -> None:
        """Give a synced file of a folder of its own this name too, which fails if the name is taken."""
        beside = self.at(f"save-{secrets.token_hex(8)}")  # left by a kill, it goes as any save's folder does
        with beside.claim():
            try:
                with beside.writer(name) as file:
                    file.write(content)
                try:
                    _name_once(beside.path / name, self.path / name, content)
                except FileExistsError:  # maybe of our own request, which was answered late and sent again
                    if (self.path / name).read_bytes() != content:
                        raise
                self.sync()
            finally:
                beside.remove([name])

    @contextmanager
    def writer(self, name: str) -> Iterator[BinaryIO]:
        """Write a new file; it and its name are synced."""
        with (self.path / name).open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        self.sync()

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, and the folder if it is empty then; what a link leads to is not removed."""
        if self.path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, and what it leads to stays", str(self.path))
        for name in names:
            with suppress(FileNotFoundError, IsADirectoryError):  # a folder is not ours
                (self.path / name).unlink()
        with suppress(OSError):
            self.path.rmdir()

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Make the folder, and a file in it that this process locks, where the file system has locks."""
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
        """Return True if a claim's lock is held, or may be, or the folder is so new that one may come."""
        entries = self.list()
        if not entries:
            return _age(self.path) < BEGIN_SECONDS
        return any(_is_alive(self.path / name) for name in entries if name.startswith(CLAIM))

    def local_cache(self, nonce: str) -> Disk:
        """Return itself."""
        del nonce
        return self

    def local(self, name: str) -> Path:
        """Return the file's path."""
        return self.path / name

    def fetch(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Make the folder's entries survive a power cut."""
        if os.name != "nt":  # a folder cannot be opened there
            handle = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


class _Opened:
    """A file that is open until nobody reads it any more."""

    handle = -1

    def __init__(self, folder: Path, name: str) -> None:
        wanted = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")  # as far as the system has them
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
    """Read from this place on; how many bytes came."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [into], start)
    os.lseek(handle, start, os.SEEK_SET)
    content = os.read(handle, len(into))
    into[: len(content)] = content
    return len(content)


def _name_once(source: Path, target: Path, content: bytes) -> None:
    """Give a file a name that nothing has, in one step where the file system can."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        with target.open("xb") as file:  # not whole at once: until it is, the one before counts
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _lock(handle: int) -> bool:
    """Lock a claim's file; False where there are no locks."""
    if not HAS_LOCKS:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True


def _is_alive(claim: Path) -> bool:
    """Return True if the process that made this claim may be alive."""
    if claim in _held:
        return True
    try:
        with claim.open("rb") as file:
            boot, _, _ = file.read(1024).decode(errors="replace").partition(" ")
            if not boot:  # it is being made
                return _age(claim) < BEGIN_SECONDS
            if HAS_LOCKS and boot == _boot():
                return _is_locked(file.fileno())
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return _age(claim) < CLAIM_SECONDS  # of another machine, or without a lock


def _is_locked(handle: int) -> bool:
    """Return True if another process has locked the file. Raises OSError where there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False


def _age(path: Path) -> float:
    """Return the seconds since a file or folder was changed; of one that is gone, many."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def _boot() -> str:
    """Return the id of this machine's start, of whose processes a lock tells; else the machine's name."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else platform.node()
