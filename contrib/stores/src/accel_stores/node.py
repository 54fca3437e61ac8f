"""The part of a stored folder that is read, on the disk of a node."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from errno import ENOSPC
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Final
from weakref import finalize

from accel_core import Disk, Storage
from accel_stores.scratch import scratch_folder

__all__ = ["NodeCopy"]

BLOCK_BYTES: Final = 4 << 20
"""Bytes of a file that come together, as checkpoints have blocks."""
REQUEST_BLOCKS: Final = 4
AT_ONCE: Final = 4
"""Largest number of requests at a time, and of blocks in one."""
LIST: Final = "list.json"


class NodeCopy:
    """A folder that does not change while it is read, and the blocks of its files that were read already.

    Each block is a file; processes that ask for one at once wait for the one that brings it. What is written
    goes to the folder itself.
    """

    shared = False

    def __init__(self, folder: Storage, nonce: str) -> None:
        self.folder = folder
        self.name, self.at, self.create, self.writer = folder.name, folder.at, folder.create, folder.writer
        self.remove, self.claim, self.is_claimed = folder.remove, folder.claim, folder.is_claimed
        self.local = folder.local
        self._place = f"near-{nonce}"
        self._sizes: Mapping[str, int | None] | None = None

    def __str__(self) -> str:
        return str(self.folder)

    @cached_property
    def _disk(self) -> Disk:
        stack = ExitStack()
        disk = Disk(stack.enter_context(scratch_folder(self._place)))
        finalize(self, stack.close)
        return disk

    def list(self) -> Mapping[str, int | None]:
        """Return what the folder held when it was listed first on this node."""
        if self._sizes is None:
            with _brought(self._disk.path / LIST) as file:
                if file is not None:
                    file.write_text(json.dumps(dict(self.folder.list())))
            self._sizes = json.loads((self._disk.path / LIST).read_text())
        return self._sizes

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` from the blocks here; those that are not here come first."""
        size = self._size(name)
        if start + len(into) > size:
            raise EOFError(f"it ends after {size} bytes")
        self._bring(name, range(start // BLOCK_BYTES, -(-(start + len(into)) // BLOCK_BYTES)))
        while into:
            block, offset = divmod(start, BLOCK_BYTES)
            part = into[: BLOCK_BYTES - offset]
            self._disk.read(f"{name}.{block}", offset, part)
            start, into = start + len(part), into[len(part) :]

    def local_cache(self, nonce: str) -> NodeCopy:
        """Return itself."""
        del nonce
        return self

    def fetch(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Bring the blocks that these ranges lie in. OSError: the disk has no room for them."""
        blocks = {
            block
            for start, size in ranges
            for block in range(start // BLOCK_BYTES, -(-(start + size) // BLOCK_BYTES))
        }
        self._bring(name, sorted(blocks))

    def _size(self, name: str) -> int:
        if (size := self.list().get(name)) is None:
            raise FileNotFoundError(f"{self.folder}/{name} is not there")
        return size

    def _bring(self, name: str, blocks: Sequence[int]) -> None:
        there = self._disk.path
        missing = [block for block in blocks if not (there / f"{name}.{block}").exists()]
        if not missing:
            return
        needed, free = BLOCK_BYTES * (len(missing) - 1), shutil.disk_usage(there).free
        needed += min(BLOCK_BYTES, self._size(name) - BLOCK_BYTES * missing[-1])
        if free < needed:
            text = f"{there} has room for {free} bytes, and {needed} are needed"
            raise OSError(ENOSPC, f"{text}; set TMPDIR to a folder with room")
        _do_at_once([partial(self._ask, name, group) for group in _groups(missing)])

    def _ask(self, name: str, blocks: range) -> None:
        """Bring blocks by one request, as far as no other process has."""
        with ExitStack() as stack:
            paths = [self._disk.path / f"{name}.{block}" for block in blocks]
            files = [stack.enter_context(_brought(path)) for path in paths]
            wanted = [number for number, file in enumerate(files) if file is not None]
            if not wanted:
                return
            first, last = blocks[wanted[0]], blocks[wanted[-1]]
            start, end = first * BLOCK_BYTES, min((last + 1) * BLOCK_BYTES, self._size(name))
            content = memoryview(bytearray(end - start))
            self.folder.read(name, start, content)
            for number in wanted:
                (file := files[number]) and file.write_bytes(
                    content[(blocks[number] - first) * BLOCK_BYTES :][:BLOCK_BYTES]
                )


def _groups(blocks: Sequence[int]) -> Iterator[range]:
    """Yield neighbours, as many as one request brings."""
    start = end = blocks[0]
    for block in [*blocks, -1]:
        if block != end or end - start == REQUEST_BLOCKS:
            yield range(start, end)
            start = block
        end = block + 1


@contextmanager
def _brought(path: Path) -> Iterator[Path | None]:
    """Give a file to write that gets this name when the context ends; None once the name is there.

    One process or thread at a time.
    """
    part = path.with_name(f"{path.name}.part")
    if path.exists():
        yield None
        return
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if path.exists():
                yield None
                return
            yield part
            part.replace(path)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked process has it too


def _do_at_once(actions: Iterable[Callable[[], object]]) -> None:
    """Do all of these, some at a time; raise the first error.

    Nothing waits for a store then: neither this, nor the end of the process, as with a pool of threads.
    """
    left = deque(actions)
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def next_one() -> Callable[[], object] | None:
        with suppress(IndexError):
            return left.popleft()
        return None

    def work() -> None:
        error = None
        try:
            while (action := next_one()) is not None:
                action()
        except BaseException as raised:  # the caller waits for it
            error = raised
        ended.put(error)

    threads = min(AT_ONCE, len(left))
    try:
        for _ in range(threads):
            Thread(target=work, name="fetch", daemon=True).start()
        for _ in range(threads):
            if (error := ended.get()) is not None:
                raise error
    finally:
        left.clear()
