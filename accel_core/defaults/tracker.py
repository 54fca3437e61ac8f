"""The default tracker: a file of JSON lines."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_core.contract import hooks
from accel_core.contract.hooks import implements
from accel_core.defaults.lines import LineFile
from accel_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_core.contract.config import RunConfig
    from accel_core.contract.run import Run


class JsonLines:
    """Write `logging_dir/PROJECT.jsonl`: one line per run and per `log`.

    A run that is resumed appends, as do two runs at once; each line names its run. A run that takes another
    run's id, by `load_state`, writes its first line again under that id. See `LineFile`.
    """

    def __init__(self, config: Any, run: Run) -> None:
        self.run = run
        self._file: LineFile | None = None
        self._begun: tuple[str, Mapping[str, Any]] | None = None
        """The id of the run whose first line is written, and the other values of that line."""
        self._warned = False

    @property
    def tracker(self) -> Path:
        """The file's path."""
        assert self._file is not None
        return self._file.path

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        folder = config.project.logging_dir
        if folder is None:
            return ["tracker jsonl has no folder to write to: give Accelerator(project_dir=...)"]
        if "://" in folder:
            return [f"tracker jsonl writes to a local folder, not to {folder}: give logging_dir"]
        return []

    @implements(hooks.tracking_started)
    def tracking_started(self, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        _refuse(options, "init_kwargs")
        path = Path(str(self.run.config.project.logging_dir), f"{project}.jsonl")
        try:
            self._file = LineFile(path)
            self._begin({"project": project, "config": config})
        except OSError as error:
            raise ConfigError(
                f"tracker jsonl cannot write {path}: {type(error).__name__}: {error}\n"
                "make room there, or give another logging_dir or project name"
            ) from error

    @implements(hooks.log)
    def log(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        _refuse(options, "log_kwargs")
        assert self._file is not None
        assert self._begun is not None
        known, settings = self._begun
        try:
            if known != self.run.run_id:
                self._begin(settings)
            self._file.write(run=self.run.run_id, step=step, values=values)
        except OSError as error:  # such as a full disk: values are lost, and the training goes on
            if not self._warned:
                self._warned = True
                text = f"tracker jsonl loses values, and training goes on: {self._file.path}: {error}"
                warnings.warn(text, stacklevel=2)

    @implements(hooks.run_ended)
    def run_ended(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self, settings: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(run=self.run.run_id, **settings)
        self._begun = self.run.run_id, settings


def _refuse(options: Mapping[str, Any], where: str) -> None:
    if options:
        given = ", ".join(options)
        raise ConfigError(f"{where}: tracker jsonl has no options, but was given {given}\nleave them out")
