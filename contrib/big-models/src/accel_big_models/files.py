"""Weights in files: opened once, mapped or read."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import Any, Final

import torch
from attrs import field, frozen
from torch import Tensor

from accel_core import CheckpointError

__all__ = ["InFile", "OpenFile"]

CHUNK: Final = 16 << 20
"""Bytes read at a time where a weight's dtype changes on the way."""
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)


class OpenFile:
    """A file that stays open: what replaces it under its name is not seen.

    path: as given. size: in bytes. mapped: whether weights are views of it.
    """

    def __init__(self, path: str | os.PathLike[str], *, mapped: bool = True) -> None:
        self.path = Path(path)
        try:
            self._file = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be opened: {error.strerror}\ngive a file of weights that is there",
                path=str(self.path),
            ) from error
        weakref.finalize(self, os.close, self._file)
        self._where = self.path.resolve()  # the path may be relative, or a link that ends before the model
        self._identity = self._state()
        self.size = self._identity[0]
        self.mapped = mapped
        self._bytes: Tensor | None = None

    def read(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on.

        Raises:
            CheckpointError: the file is shorter, something wrote to it since it was opened, or its disk
                cannot be read.
        """
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._file, [target[done : done + (1 << 30)]], start + done)
            except OSError as error:
                raise self._damaged(f"byte {start + done} cannot be read: {error.strerror}") from error
            if count == 0:
                raise self._damaged(f"it ends at byte {start + done}, before its weights do: it was cut")
            done += count
        if (now := self._state()) != self._identity:
            if now[0] < self.size:
                raise self._damaged(
                    f"it has {now[0]} bytes, and had {self.size} when it was opened: it was cut"
                )
            raise self._damaged("something wrote to it since it was opened: its weights may be others")

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def view(self, start: int, size: int) -> Tensor:
        """Return bytes of the mapped file; writes to them stay in this process."""
        if self._bytes is None:
            flags = mmap.MAP_PRIVATE | _NO_RESERVE  # pages that are never written cost nothing
            mapping = mmap.mmap(self._file, self.size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        return self._bytes[start : start + size]

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}\ncopy or download it again", path=str(self.path))

    def __deepcopy__(self, memo: Any) -> OpenFile:
        return self

    def __reduce__(self) -> Any:
        return _open_again, (str(self._where), self.mapped, self._identity)


def _open_again(path: str, mapped: bool, identity: tuple[int, int]) -> OpenFile:
    file = OpenFile(path, mapped=mapped)
    if file._identity != identity:
        raise CheckpointError(
            f"{path} is not the file that the model's weights were in: size or time differ\n"
            "load the model again",
            path=path,
        )
    return file


@frozen(eq=False)
class InFile:
    """A weight that lies in a file.

    start: of its first byte. stored: dtype in the file. dtype: as it is computed.
    """

    file: OpenFile
    start: int
    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype = field()

    @dtype.default
    def _own(self) -> torch.dtype:
        return self.stored

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * self.stored.itemsize

    def tensor(self) -> Tensor | None:
        """Return the weight as a view of the mapped file, or None if it has to be read."""
        aligned = self.start % self.stored.itemsize == 0
        if not self.size:
            return torch.empty(self.shape, dtype=self.dtype)
        if not self.file.mapped or self.stored != self.dtype or not aligned:
            return None
        return self.file.view(self.start, self.size).view(self.stored).reshape(self.shape)

    def read(self, target: Tensor) -> None:
        """Fill a contiguous CPU tensor of the weight's shape and dtype.

        Raises:
            CheckpointError: the file is shorter, or its disk cannot be read.
        """
        if self.stored == self.dtype:
            self.file.read(self.start, _memory(target))
            return
        flat = target.reshape(-1)
        count = max(1, CHUNK // self.stored.itemsize)
        chunk = torch.empty(min(count, flat.numel()), dtype=self.stored)
        for first in range(0, flat.numel(), count):
            part = chunk[: min(count, flat.numel() - first)]
            self.file.read(self.start + first * self.stored.itemsize, _memory(part))
            flat[first : first + part.numel()].copy_(part)


def _memory(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
