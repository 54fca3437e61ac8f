"""Files of JSON lines, of which a kill cuts the last one at most."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["LineFile"]


class LineFile:
    """Append lines to a file, which is made with its folder if it does not exist.

    Each line is one write of the operating system. A kill, or a full disk, may cut the last one between two
    pages of memory; the next run begins a line of its own. What is not finite is "NaN", "Infinity" or
    "-Infinity", as JSON has no such numbers.

    Raises OSError where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(path, "a+")
        self.is_new = not self._file.tell()
        if not self.is_new and self._last_byte() != b"\n":  # a full disk cut the last run's line
            self._file.write(b"\n")

    def fileno(self) -> int:
        """Return the number of the open file."""
        return self._file.fileno()

    def write(self, **fields: Any) -> None:
        """Append a line: the seconds since 1970 under "time", and any values by name."""
        line = json.dumps({"time": round(time.time(), 3), **_plain(fields)}, ensure_ascii=False)
        self._file.write(f"{line}\n".encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _last_byte(self) -> bytes:
        self._file.seek(-1, io.SEEK_END)
        return self._file.read(1)


def _plain(value: Any) -> Any:
    """Convert a value to JSON's: tensors to nested lists, unknown objects to text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if isinstance(value, (Tensor, np.ndarray, np.generic)) else str(value)
