"""A folder in a store, as checkpoints are kept there."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from time import time
from typing import IO, Any, Final

from accel_core import Storage
from accel_stores.node import NodeCopy
from accel_stores.objects import Objects
from accel_stores.scratch import is_used, scratch_folder, scratch_root

__all__ = ["Bucket"]

CLAIM: Final = "claim-"
"""Start of the name of a claim's file."""
CLAIM_SECONDS: Final = 24 * 3600.0
"""Age from which a claim of another machine counts for nothing."""
_proved: Final[set[str]] = set()
"""Stores that have refused a second create in this process, by scheme and bucket."""


class Bucket:
    """See `accel_core.Storage`. url: without a slash at its end."""

    shared = True

    def __init__(self, objects: Objects, url: str) -> None:
        self.objects, self.url = objects, url

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.url.rpartition("/")[2]

    def at(self, name: str) -> Bucket:
        """Return a folder in it."""
        return Bucket(self.objects, f"{self.url}/{name}")

    def list(self) -> Mapping[str, int | None]:
        """List it."""
        return self.objects.entries(self.url)

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` by one request."""
        try:
            content = self.objects.content(f"{self.url}/{name}", start, len(into))
        except FileNotFoundError as error:
            if name in self.list():
                raise OSError(f"{name} is listed, and was not found: {error}") from error
            raise
        if len(content) != len(into):
            size = self.list().get(name)
            if size is not None and size < start + len(into):
                raise EOFError(f"it ends after {size} bytes")
            raise OSError(f"{len(content)} of {len(into)} bytes came of {name}")
        into[:] = content

    def create(self, name: str, content: bytes) -> None:
        """Create a file by one request that fails if it is there, once the store has proved that it does."""
        if self._place not in _proved:
            with self.claim():
                pass
        self.objects.create(f"{self.url}/{name}", content)

    @contextmanager
    def writer(self, name: str) -> Iterator[IO[bytes]]:
        """Write a file on this machine, and send it when the context ends."""
        with scratch_folder(token_hex(8)) as folder:
            with (folder / "file").open("xb") as file:
                yield file
            self.send(folder / "file", name)

    def send(self, source: Path, name: str) -> None:
        """Write a file from one of this machine."""
        self.objects.send(source, f"{self.url}/{name}")

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; a folder is there while a file is."""
        if names:
            self.objects.remove([f"{self.url}/{name}" for name in names])

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Create a file that names this machine, which holds a folder of the same name meanwhile.

        Of a store that keeps what is removed, nobody needs a claim to read.
        """
        if self.objects.keeps_history and self.list():
            yield
            return
        name = f"{CLAIM}{token_hex(8)}"
        with scratch_folder(name):
            self._create_claim(name)
            try:
                yield
            finally:
                with suppress(OSError):
                    self.remove([name])

    def _create_claim(self, name: str) -> None:
        """Create it; the first one of this process is created twice, to prove that a store refuses that.

        Raises:
            OSError: the store does not.
        """
        with suppress(FileExistsError):  # of our own request, which was answered late and sent again
            self.objects.create(f"{self.url}/{name}", f"{_machine()} {time():.0f}\n".encode())
        if self._place in _proved:
            return
        try:
            self.objects.create(f"{self.url}/{name}", b"")
        except FileExistsError:
            _proved.add(self._place)
            return
        except OSError:
            with suppress(OSError):
                self.remove([name])
            raise
        self.remove([name])
        raise OSError(
            "this store created one file twice, so two savers would not see each other; save to one that"
            " supports conditional writes (If-None-Match), or to a disk"
        )

    @property
    def _place(self) -> str:
        return "/".join(self.url.split("/")[:3])

    def is_claimed(self) -> bool:
        """Return True if a claim's process is alive, or may be on another machine."""
        return any(size and self._is_alive(name, size) for name, size in self._claims())

    def _claims(self) -> Iterable[tuple[str, int | None]]:
        return [each for each in self.list().items() if each[0].startswith(CLAIM)]

    def _is_alive(self, name: str, size: int) -> bool:
        content = bytearray(min(size, 1024))
        try:
            self.read(name, 0, memoryview(content))
        except FileNotFoundError:
            return False
        machine, _, since = content.decode(errors="replace").strip().rpartition(" ")
        if machine == _machine():
            return is_used(name)
        return not since.isdecimal() or time() - int(since) < CLAIM_SECONDS

    def local_cache(self, nonce: str) -> Storage:
        """Return it with a copy on this node of what is read."""
        return NodeCopy(Bucket(self.objects, self.objects.pinned(self.url)), nonce)

    def local(self, name: str) -> None:
        """Return None."""
        del name

    def fetch(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: there is no place near."""
        del name, ranges


def _machine() -> str:
    """Return words for the processes that see each other's folders here: boot, host and place."""
    boot, root = Path("/proc/sys/kernel/random/boot_id"), scratch_root().stat()
    started: Any = boot.read_text().strip() if boot.exists() else "-"
    return f"{started} {platform.node()} {root.st_dev}:{root.st_ino}"
