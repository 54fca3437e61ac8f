"""The part of a stored checkpoint that is read, on the disk of a node."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from weakref import finalize

from accel_core.checkpoint.stored import UnreadableError


class NodeCopy:
    """A folder for blocks that come from a store.

    It is removed with this object, or by `close`. The ranks of a node have one in
    common, which the first of them made. make: a context with a new folder. sizes: file name -> bytes.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Path]], sizes: Mapping[str, int]) -> None:
        self._make, self._sizes, self._made = make, sizes, ExitStack()
        self.close = finalize(self, self._made.close)

    @cached_property
    def folder(self) -> Path:
        """The folder, made when it is first asked for, with its files.

        They are made nowhere else: one that was removed, and made again, would have zeros for what it had.

        Raises:
            UnreadableError: the disk does not take it.
        """
        with _writing("the folder for what comes from a store"):
            folder = self._made.enter_context(self._make())
            for name, size in self._sizes.items():
                (folder / name).touch(mode=0o600)
                os.truncate(folder / name, size)
        return folder

    def share(self, folder: Path) -> None:
        """Use the folder that another rank has made, if it can be used here."""
        if os.access(folder, os.W_OK):
            self.folder = folder

    def keep(self, name: str, start: int, content: memoryview) -> None:
        """Write a part of the file of this name.

        From any thread and rank of the node.

        Raises:
            UnreadableError: the disk does not take it, or the file was removed.
        """
        path = self.folder / name
        with _writing(path), path.open("r+b") as file:
            file.seek(start)
            file.write(content)


@contextmanager
def _writing(what: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnreadableError(
            f"{what} could not be written: {error}\nset TMPDIR to another folder, and load again"
        ) from error
