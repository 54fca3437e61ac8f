"""Files of JSON lines, of which a kill damages the last line at most."""

from __future__ import annotations

import errno
import json
import math
import os
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor


class LineFile:
    """Append lines to a file, which is created with its folder if it does not exist.

    Each line is one write of the operating system. A kill or a full disk may cut the last line between two
    pages of memory; the next run begins a new line. Numbers that are not finite become "NaN", "Infinity" or
    "-Infinity", since JSON has no such numbers.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._file = os.open(path, flags, 0o666)
        self.close = weakref.finalize(self, os.close, self._file)
        """Close the file. Also called when the last reference to this object is gone."""
        size = os.fstat(self._file).st_size
        if size and self._byte(size - 1) != b"\n":  # a kill or a full disk cut the last run's line
            os.write(self._file, b"\n")

    def fileno(self) -> int:
        """Return the number of the open file."""
        return self._file

    def write(self, **fields: Any) -> None:
        """Append a line: the seconds since 1970 under "time", and any values by name.

        Raises:
            ValueError: the file is closed: its number may belong to another file by now.
        """
        if not self.close.alive:
            raise ValueError(f"{self.path} is closed")
        line = json.dumps({"time": round(time.time(), 3), **_plain(fields)}, ensure_ascii=False)
        content = f"{line}\n".encode(errors="backslashreplace")  # half a surrogate pair, as in odd file names
        if os.write(self._file, content) < len(content):
            raise OSError(
                errno.ENOSPC, f"{self.path}: only a part of a line was written; the disk may be full"
            )

    def _byte(self, at: int) -> bytes:
        os.lseek(self._file, at, os.SEEK_SET)
        return os.read(self._file, 1)


def _plain(value: Any) -> Any:
    """Convert a value to JSON's types: tensors to nested lists, unknown objects to text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    # `tolist` does not convert numpy's long doubles: they become text.
    if isinstance(value, (Tensor, np.ndarray, np.generic)) and not isinstance(
        value, (np.longdouble, np.clongdouble)
    ):
        with suppress(RuntimeError):  # a sparse, quantized or meta tensor has no list
            return _plain(value.tolist())
    return str(value)
