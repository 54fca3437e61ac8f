"""The default tracker: a file of JSON lines."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from accel_core.contract import hooks
from accel_core.contract.hooks import implements
from accel_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_core.contract.config import RunConfig
    from accel_core.contract.run import Run

__all__ = ["JsonLines"]


class JsonLines:
    """Write `logging_dir/PROJECT.jsonl`: one line per run and per `log`.

    A run that is resumed appends. Each line is one write of the operating system: readers and a kill
    see whole lines. What is not finite is "NaN", "Infinity" or "-Infinity", as JSON has no such numbers.
    """

    def __init__(self, config: Any, run: Run) -> None:
        self.run = run
        self._file: io.FileIO | None = None

    @property
    def tracker(self) -> Path:
        """The file's path."""
        assert self._file is not None
        return Path(str(self._file.name))

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        if config.project.logging_dir is None:
            return ["tracker jsonl has no folder to write to: give Accelerator(project_dir=...)"]
        return []

    @implements(hooks.tracking_started)
    def tracking_started(self, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        _refuse(options, "init_kwargs")
        path = Path(str(self.run.config.project.logging_dir), f"{project}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(path, "a+")
        if self._file.tell() and _last_byte(self._file) != b"\n":  # a full disk cut the last run's line
            self._file.write(b"\n")
        self._write(run=self.run.run_id, project=project, config=config)

    @implements(hooks.log)
    def log(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        _refuse(options, "log_kwargs")
        self._write(step=step, values=values)

    @implements(hooks.run_ended)
    def run_ended(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, **record: Any) -> None:
        assert self._file is not None
        line = json.dumps({"time": round(time.time(), 3), **_plain(record)}, ensure_ascii=False)
        self._file.write(f"{line}\n".encode())


def _refuse(options: Mapping[str, Any], where: str) -> None:
    if options:
        given = ", ".join(options)
        raise ConfigError(f"{where}: tracker jsonl has no options, but was given {given}\nleave them out")


def _last_byte(file: io.FileIO) -> bytes:
    file.seek(-1, io.SEEK_END)
    return file.read(1)


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
