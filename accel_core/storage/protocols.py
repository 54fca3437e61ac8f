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
"""Returns bytes done, and those of all."""


class Writer(Protocol):
    """A new file that is being written."""

    def write(self, part: bytes | memoryview, /) -> object:
        """Add bytes to it."""


class Storage(Protocol):
    """A folder: on a disk, or a prefix of a bucket. As text it is what a user would give.

    Methods raise OSError, of its kinds FileNotFoundError and FileExistsError where these are meant. By any
    thread.

    shared: all ranks see it; else each node has one of its own.
    """

    shared: bool

    @property
    def name(self) -> str:
        """The last part of its path."""

    def at(self, name: str) -> Storage:
        """Return a folder in it, which need not be there."""

    def list(self) -> Mapping[str, int | None]:
        """Return name -> bytes of each file, None of all else. Empty where there is no such folder."""

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `start` on. EOFError: it ends before."""

    def create(self, name: str, content: bytes) -> None:
        """Write a small file, durably and whole or not at all. FileExistsError: there is one of that name."""

    def writer(self, name: str) -> AbstractContextManager[Writer]:
        """Write a new file, durable when the context ends. OSError, if there is no room for it."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove those files that are there, in this order, and the folder if it is empty then."""

    def claim(self) -> AbstractContextManager[object]:
        """Make the folder; while the context is entered, no other save takes it for one that was killed.

        Where a place has no locks, or on another node, that holds for 24 hours.
        """

    def is_claimed(self) -> bool:
        """Return True if a claim may be in force."""

    def local_cache(self, nonce: str) -> Storage:
        """Return the same folder, to be read several times by the ranks of this node: of a disk, itself.

        What it keeps goes with it. nonce: text that is the same on all ranks, and used by no other load.
        """

    def local(self, name: str) -> Path | None:
        """Return where a file lies on this machine; None if it does not, or not all of it."""

    def fetch(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Bring these (start, size) of a file near, at once. A disk does nothing."""


class Mailbox(Protocol):
    """Messages of this rank to the others, and theirs, by key. From any thread, no collective."""

    @property
    def timeout(self) -> float:
        """Seconds that a rank is waited for which does not say that it is alive."""

    def put(self, key: str, message: Message) -> None:
        """Let the other ranks read it."""

    def wait(self, senders: Mapping[int, str], timeout: float) -> dict[int, Message | None]:
        """Return what these ranks sent under their keys; None of those that are silent and not alive."""

    def alive(self) -> AbstractContextManager[object]:
        """Say, while the context is entered, that this rank is at work."""

    def delete(self, *keys: str) -> None:
        """Remove messages that all have read."""


class Comm(Protocol):
    """The ranks that save or load together; two ways to agree."""

    rank: int
    nodes: Sequence[int]
    """The node of each rank."""

    def together(self, step: str, action: Callable[[], T]) -> Sequence[T]:
        """Run the action on all ranks; return all results in rank order, or raise on all. Collective."""

    def mailbox(self, key: str) -> Mailbox:
        """Return a mailbox of this key."""

    def shown(self, text: str, measure: Measure | None = None) -> AbstractContextManager[object]:
        """Show what the context does, if it takes long."""
