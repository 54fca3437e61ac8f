"""The part of a stored checkpoint that is read, on the disk of a node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from weakref import finalize

from accel_core.checkpoint.stored import UnreadableError


class NodeCopy:
    """A folder for blocks that come from a store.

    It is removed with this object, or by `close`. The ranks of a node have one in
    common, which the first of them made. make: a context with a new folder.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Path]]) -> None:
        self._make, self._made = make, ExitStack()
        self.close = finalize(self, self._made.close)

    @cached_property
    def folder(self) -> Path:
        """The folder, made when it is first asked for."""
        return self._made.enter_context(self._make())

    def share(self, folder: Path) -> None:
        """Use the folder that another rank has made, if it can be seen here."""
        if folder.is_dir():
            self.folder = folder

    def keep(self, name: str, size: int, start: int, content: memoryview) -> None:
        """Write a part of the file of this name, which has `size` bytes in all.

        From any thread and rank of the node.

        Raises:
            UnreadableError: the disk does not take it.
        """
        path = self.folder / name
        try:
            path.touch(mode=0o600)
            with path.open("r+b") as file:
                file.truncate(size)
                file.seek(start)
                file.write(content)
        except OSError as error:
            raise UnreadableError(
                f"{path} could not be written: {error}\nset TMPDIR to another folder, and load again"
            ) from error
