"""A run's values as event files, by torch's SummaryWriter."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.utils.tensorboard import SummaryWriter

from accel_core import AccelError, ConfigError, hooks, implements

if TYPE_CHECKING:
    from accel_core import Run, RunConfig

__all__ = ["TensorBoardTracker"]

_STEPS: Final = 2**63


class TensorBoardTracker:
    """Tracker `tensorboard`: writes to `logging_dir/PROJECT`, on the main process.

    name: as on the card, for scripts that look through `accelerator.trackers`.
    writer: torch's SummaryWriter; also as `get_tracker("tensorboard", unwrap=True)`.
    """

    name = "tensorboard"
    writer: SummaryWriter | None = None
    _warned = False
    _warned_of_steps = False

    def __init__(self, config: object, run: Run) -> None:
        self.run = run
        self._without_step: set[str] = set()

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
        try:
            self.writer = SummaryWriter(**{"log_dir": str(folder), **options})
            self._store(config)
        except OSError as error:  # of the writer's thread
            raise ConfigError(
                f"tracker tensorboard cannot write to {folder}: {error}\n"
                "make room there, or give another logging_dir or project name"
            ) from error

    def _store(self, config: Mapping[str, Any]) -> None:
        if config:
            text = json.dumps(config, indent=2, default=str, ensure_ascii=False)
            self.tracker.add_text("config", _unicode(f"```json\n{text}\n```"))
            # In the same folder: a sub-run of its own, as by default, would have no scalars.
            settings = {_unicode(name): _setting(value) for name, value in _flat(config)}
            self.tracker.add_hparams(settings, {}, run_name=".")
            self.tracker.flush()

    @implements(hooks.log)
    def log(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        """Log numbers as scalars, text as text, mappings' entries as OUTER/INNER.

        None is left out. Of text that is not Unicode, the parts that are not are escaped.

        `options` are arguments of add_scalar and add_text, such as walltime.
        """
        _require_step(step)
        for name, value in _flat(values):
            tag = _unicode(name)
            if isinstance(value, str):
                self._add(self.tracker.add_text, tag, _unicode(value), step, options)
            elif isinstance(value, Number):
                self._add(self.tracker.add_scalar, tag, _real(name, value), step, options)
            elif value is not None:
                raise _no_place(name, f"a {type(value).__qualname__}")

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log images by name: (n, 3, height, width), or as `dataformats` says."""
        for name, images in values.items():
            self.tracker.add_images(name, images, step, **options)

    @implements(hooks.run_ended)
    def run_ended(self) -> None:
        if self.writer is not None:
            try:
                self.writer.close()
            except OSError as error:
                self._lose(error)

    def _add(
        self,
        add: Callable[..., None],
        tag: str,
        value: float | str,
        step: int | None,
        options: Mapping[str, Any],
    ) -> None:
        if step is None:
            self._note_no_step(tag)
        try:
            add(tag, value, step, **options)
        except OSError as error:  # of the writer's thread
            self._lose(error)

    def _note_no_step(self, tag: str) -> None:
        """Warn once: an event without a step is one of step 0, and there may be several."""
        if tag in self._without_step and not self._warned_of_steps:
            self._warned_of_steps = True
            text = f"tracker tensorboard shows all values of {tag!r} at step 0, as no step is given"
            warnings.warn(f"{text}; call log(values, step=...)", stacklevel=2)
        self._without_step.add(tag)

    def _lose(self, error: OSError) -> None:
        """Warn once: a full disk, say, costs what was to be logged, and not the training."""
        if not self._warned:
            self._warned = True
            folder = self.tracker.log_dir
            text = f"tracker tensorboard loses values, and training goes on: {folder}: {error}"
            warnings.warn(text, stacklevel=2)


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    names: set[str] = set()
    for name, value in _joined(values, ""):
        if name in names:
            raise AccelError(f"tensorboard would have two values called {name!r:.80}\ngive them other names")
        names.add(name)
        yield name, value


def _joined(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _joined(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _require_step(step: int | None) -> None:
    if step is not None and not -_STEPS <= step < _STEPS:
        raise AccelError(
            f"log: tensorboard cannot count a step {step!r:.80}: its steps are whole numbers of 64 bits\n"
            "give the number of the step"
        )


def _real(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, OverflowError):  # a complex number, or a whole one beyond a float
        raise _no_place(name, f"{value!r:.80}") from None


def _no_place(name: str, what: str) -> AccelError:
    return AccelError(
        f"log: tensorboard has no place for {name!r}, {what}\n"
        'log numbers and text; give the rest to get_tracker("tensorboard", unwrap=True)'
    )


def _unicode(text: str) -> str:
    """Return the text with half a surrogate escaped, which an event cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _setting(value: Any) -> bool | int | float | str:
    """Return a value that a table of settings can hold: numbers as float64, or text."""
    is_exact = isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**53)
    return value if is_exact else _unicode(str(value))
