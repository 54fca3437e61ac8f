"""A run's values as event files, by torch's SummaryWriter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard import SummaryWriter

from accel_core import AccelError, hooks, implements

if TYPE_CHECKING:
    from accel_core import Run, RunConfig

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker:
    """Tracker `tensorboard`: writes to `logging_dir/PROJECT`, on the main process.

    name: as on the card, for scripts that look through `accelerator.trackers`.
    writer: torch's SummaryWriter; also as `get_tracker("tensorboard", unwrap=True)`.
    """

    name = "tensorboard"
    writer: SummaryWriter | None = None

    def __init__(self, config: object, run: Run) -> None:
        self.run = run

    @property
    def tracker(self) -> SummaryWriter:
        """The writer, as get_tracker's `unwrap` gives it."""
        assert self.writer is not None
        return self.writer

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        folder = config.project.logging_dir
        if folder is None:
            return ["tracker tensorboard has no folder to write to: give Accelerator(project_dir=...)"]
        if "://" in folder:
            return [f"tracker tensorboard writes to a local folder, not to {folder}: give logging_dir"]
        return []

    @implements(hooks.tracking_started)
    def tracking_started(self, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """`options` are arguments of SummaryWriter, such as flush_secs."""
        folder = Path(str(self.run.config.project.logging_dir), project)
        self.writer = SummaryWriter(**{"log_dir": str(folder), **options})
        if config:
            text = json.dumps(config, indent=2, default=str, ensure_ascii=False)
            self.writer.add_text("config", f"```json\n{text}\n```")
            # In the same folder: a sub-run of its own, as by default, would have no scalars.
            settings = {name: _setting(value) for name, value in _flat(config)}
            self.writer.add_hparams(settings, {}, run_name=".")
            self.writer.flush()

    @implements(hooks.log)
    def log(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        """Log numbers as scalars, text as text, mappings' entries as OUTER/INNER.

        None is left out.

        `options` are arguments of add_scalar and add_text, such as walltime.
        """
        for name, value in _flat(values):
            if isinstance(value, (Number, str)):
                add = self.tracker.add_text if isinstance(value, str) else self.tracker.add_scalar
                add(name, value, step, **options)
            elif value is not None:
                raise AccelError(
                    f"log: tensorboard has no place for {name!r}, a {type(value).__qualname__}\n"
                    'log numbers and text; give the rest to get_tracker("tensorboard", unwrap=True)'
                )

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log images by name: (n, 3, height, width), or as `dataformats` says."""
        for name, images in values.items():
            self.tracker.add_images(name, images, step, **options)

    @implements(hooks.run_ended)
    def run_ended(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _setting(value: Any) -> bool | int | float | str:
    """Return a value that a table of settings can hold."""
    return value if isinstance(value, (bool, int, float, str)) else str(value)
