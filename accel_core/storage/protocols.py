"""The protocols of a place, and of the ranks that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")
Message = Mapping[str, Any]
"""A mapping that JSON can hold."""
Measure = Callable[[], tuple[int, int]]
"""Returns (bytes done, bytes in total)."""


class Writer(Protocol):
    """A new file that is open for writing."""

    def write(self, part: bytes | memoryview, /) -> object:
        """Append bytes to the file."""


class Storage(Protocol):
    """A folder on a disk, or a prefix of a bucket. `str()` returns the path or URL as a user writes it.

    Any thread may call the methods. The methods raise OSError: FileNotFoundError for a missing file,
    FileExistsError for a name that is taken.
    """

    shared: bool
    """True if all ranks see the same folder; False if each node has a folder of its own."""

    @property
    def name(self) -> str:
        """The last part of the path."""

    def at(self, name: str) -> Storage:
        """Return a folder inside this folder; the folder need not exist."""

    def list(self) -> Mapping[str, int | None]:
        """Return name -> bytes of each file, None for other entries. Empty if the folder is missing."""

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` with a file's bytes from `start` on. Raises EOFError if the file ends before."""

    def create(self, name: str, content: bytes) -> None:
        """Write a small file durably, whole or not at all. Raises FileExistsError if the name is taken."""

    def writer(self, name: str) -> AbstractContextManager[Writer]:
        """Write a new file, durable when the context ends. Raises OSError if the disk is full."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove the files in this order, then the folder if it is empty. Missing files are skipped."""

    def claim(self) -> AbstractContextManager[object]:
        """Create the folder; while the context is entered, no other save takes this save for a killed one.

        For processes on other nodes, and on places without locks, the claim lasts 24 hours.
        """

    def is_claimed(self) -> bool:
        """Return True if a claim may be in force."""

    def local_cache(self, nonce: str) -> Storage:
        """Return a view of this folder that keeps fetched bytes for the ranks of this node.

        A disk returns itself. The cached bytes are freed with the returned object.

        Args:
            nonce: text that is the same on all ranks and unique to this load.
        """

    def local(self, name: str) -> Path | None:
        """Return the path of a file on this machine; None if the file is not, or not entirely, local."""

    def fetch(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the (start, size) ranges of a file to this node, in one go. A disk does nothing."""


class Mailbox(Protocol):
    """Messages between ranks, by key. Any thread may call the methods; no method is collective."""

    @property
    def timeout(self) -> float:
        """Seconds to wait for a rank that does not report that it is alive."""

    def put(self, key: str, message: Message) -> None:
        """Send a message that all other ranks can read."""

    def wait(self, senders: Mapping[int, str], timeout: float) -> dict[int, Message | None]:
        """Return rank -> its message under the given key; None for ranks that are silent and not alive."""

    def alive(self) -> AbstractContextManager[object]:
        """Report to the other ranks, while the context is entered, that this rank is alive."""

    def delete(self, *keys: str) -> None:
        """Remove messages that all ranks have read."""


class Comm(Protocol):
    """The ranks that save or load together, with two ways to communicate."""

    rank: int
    nodes: Sequence[int]
    """Rank -> number of its node."""

    def together(self, step: str, action: Callable[[], T]) -> Sequence[T]:
        """Run the action on all ranks; return all results in rank order, or raise on all. Collective."""

    def mailbox(self, key: str) -> Mailbox:
        """Return a mailbox whose messages have this prefix."""

    def shown(self, text: str, measure: Measure | None = None) -> AbstractContextManager[object]:
        """Show a progress message while the context is entered, if the context takes long."""
