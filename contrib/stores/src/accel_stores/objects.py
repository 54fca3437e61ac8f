"""The duties of a service of objects, as fsspec's file systems and the Hugging Face Hub have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["Objects"]


class Objects(Protocol):
    """Files by URL. Each method may be called from any thread, ends in bounded time, and raises OSError."""

    keeps_history: bool
    """Removed files can still be read under the URL that `pinned` gave before."""

    def entries(self, url: str) -> Mapping[str, int | None]:
        """Return name -> bytes of each entry of one level, None of a folder, never from a cache."""

    def content(self, url: str, start: int, size: int) -> bytes:
        """Return bytes of a file, fewer where it ends before."""

    def create(self, url: str, content: bytes) -> None:
        """Create a file by one request, which the store refuses if the file is there: FileExistsError.

        UnsupportedOperation: the library has no such request.
        """

    def send(self, source: Path, url: str) -> None:
        """Write a file, over another one of this name too."""

    def remove(self, urls: Sequence[str]) -> None:
        """Remove those files of one folder that are there."""

    def pinned(self, url: str) -> str:
        """Return the URL of what the folder holds now, or the same one."""
