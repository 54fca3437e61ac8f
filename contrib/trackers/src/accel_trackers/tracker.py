"""The tracker plugin, one for all libraries."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_core import AccelError, ConfigError, get_logger, hooks, implements
from accel_trackers.options import TrackerConfig
from accel_trackers.values import described, flat, leads_out, plain, real

if TYPE_CHECKING:
    from accel_core import Run
    from accel_trackers.libraries.library import Library

__all__ = ["LibraryTracker"]

logger = get_logger("accel_trackers")


class LibraryTracker:
    """A run of a library, on the main process.

    The library's run begins with the first thing that is logged, or when a checkpoint is saved. Until then
    `load_state` may name the run that is continued. Mistakes in names and settings raise in `init_trackers`.
    Later a failure of the library costs what was to be logged, and a warning, the first time.

    name: as on the card.
    """

    def __init__(self, config: TrackerConfig, run: Run) -> None:
        self.config, self.run, self.name = config, run, config.name
        module, _, kind = config.library.partition(":")
        self.library: Library = getattr(import_module(module), kind)()
        self._project: str | None = None
        self._settings: Mapping[str, Any] = {}
        self._options: Mapping[str, Any] = {}
        self._known: str | None = None
        """The id of the library's run, once there is one."""
        self._open = self._failed = self._ended = False
        self._warned: set[str] = set()

    @property
    def folder(self) -> Path:
        """The folder of local files."""
        asked = self.config.directory or self.run.config.project.logging_dir or "."
        return Path() if "://" in str(asked) else Path(str(asked)).resolve()

    @property
    def tracker(self) -> Any:
        """The library's object for the run.

        If the library failed to make it, it takes any call and does nothing.
        """
        return self.library.handle if self._ready() else _Silence()

    # -- hooks -----------------------------------------------------------------------------------

    @implements(hooks.tracking_started)
    def tracking_started(self, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """`options` are arguments of the library's own function, such as `wandb.init`."""
        name = project if self.config.project is None else self.config.project
        self._check_address()
        self._check_folder()
        self.library.prepare(self.config, self.folder)
        self.library.check_project(name)
        self.library.check_arguments(options)
        self._project, self._settings, self._options = name, plain(config), options

    @implements(hooks.log)
    def log(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        """Log numbers and texts; entries of mappings are called OUTER/INNER.

        None is left out.

        `options` are arguments of the library's own function.
        """
        taken: dict[str, float | str] = {}
        for name, given in flat(values):
            value = real(given)
            if isinstance(value, (int, float, str)):
                taken[name] = value
            elif value is not None:
                self._warn(
                    f"{name!r} is a {type(value).__qualname__}, which is neither a number nor text: left out"
                )
        if taken and self._ready():
            self._log(taken, step, options)

    def state_dict(self) -> Mapping[str, Any]:
        if self._project is not None and self._ready():
            with self._forgiving("what was logged last"):
                self.library.flush()
        return {} if self._known is None else {"id": self._known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        asked = state.get("id")
        if asked is None or asked == self._known:
            return
        if self._open:
            self._warn(
                f"run {self._known} was begun before load_state, and keeps what it has; {asked} goes on"
            )
            self._close()
        self._known = str(asked)

    @implements(hooks.run_ended)
    def run_ended(self) -> None:
        if self._project is not None and self._ready():  # one in which nothing was logged has settings
            self._close()
        self._ended = True

    # -- for scripts -----------------------------------------------------------------------------

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log images by name: one or a list.

        They are arrays (height, width[, channels]), or what the library takes.
        """
        self._attempt("images", self.library.log_images, values, step, **options)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table: the names of its columns and its rows, or a dataframe."""
        self._attempt("a table", self.library.log_table, table_name, columns, data, dataframe, step)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Keep a copy of a file, or a reference to a folder such as a checkpoint.

        Args:
            path: of the file or folder.
            name: of the artifact; by default that of the file.

        Raises:
            AccelError: there is nothing at that path, or the name leads out of the run.
        """
        place = Path(path)
        if name and leads_out(name):
            raise AccelError(f"log_artifact: the name {name!r} leads out of the run's files\ngive it another")
        if not place.exists():
            raise AccelError(f"log_artifact: there is nothing at {place}\ngive it a file or a folder")
        if place.is_dir():
            self._attempt("an artifact", self._refer, name or place.name, place)
        else:
            self._attempt("an artifact", self.library.log_file, place, name or place.name)

    def _refer(self, name: str, folder: Path) -> None:
        # Files may vanish while they are counted, as those of a checkpoint that is no longer kept.
        self.library.log_reference(name, described(folder))

    # -- the library's run -----------------------------------------------------------------------

    def _ready(self) -> bool:
        """True if the library's run is open, which it is made to be."""
        if self._ended:
            raise AccelError(
                f"{self.name}: its run has ended, and nothing can be logged to it\n"
                "log before accelerator.end_training()"
            )
        if self._project is None or self._failed or self._open:
            return self._open
        resumed, asked = self._known is not None, self._known or uuid.uuid4().hex
        try:
            arguments = self.library.arguments(self.config, self.folder, asked, resumed=resumed)
            self.library.open(self._project, **{**arguments, **self._options})
            self._known = self.library.run_id(str(asked))
        except Exception as error:  # the library's, of any kind: no training ends for it
            self._failed = True
            self._warn(f"the run could not be opened, and nothing is logged: {_said(error)}")
            return False
        self._open = True
        settings = {**self._settings, **({"tags": list(self.config.tags)} if self.config.tags else {})}
        if settings:
            self._attempt("settings", self.library.configure, settings)
        return True

    def _close(self) -> None:
        self._open = False
        with self._forgiving("what was logged last"):
            self.library.close()
        self.library.handle = None

    def _log(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        for part in self.library.parts(values):
            try:
                self.library.log(part, step, **options)
            except Exception as error:
                self._refuse_options(error, options)
                if len(part) == 1:
                    self._warn(f"{next(iter(part))!r} could not be logged: {_said(error)}")
                    continue
                for name, value in part.items():  # one bad name does not cost the others
                    with self._forgiving(repr(name)):
                        self.library.log({name: value}, step, **options)
        with self._forgiving("the end of a step"):
            self.library.end_log()

    def _attempt(self, what: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        if self._ready():
            try:
                call(*arguments, **options)
            except Exception as error:
                self._refuse_options(error, options)
                self._warn(f"{what} could not be logged: {_said(error)}")

    @contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the library's, of any kind: no training ends for it
            self._warn(f"{what} could not be logged: {_said(error)}")

    def _refuse_options(self, error: Exception, options: Mapping[str, Any]) -> None:
        """Raise ConfigError if the library does not know one of the options."""
        if options and isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            given = ", ".join(options)
            raise ConfigError(f"{self.name}: {error}; it was given {given}\nleave it out") from error

    def _warn(self, message: str) -> None:
        """Say once what is lost; more of its kind is lost without a word."""
        kind = message.partition(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s: %s", self.name, message, main_process_only=False)

    def _check_address(self) -> None:
        asked = str(self.config.directory or self.run.config.project.logging_dir or "")
        if "://" in asked and not (self.config.directory and self.library.takes_addresses):
            raise ConfigError(
                f"{self.name}: local files are asked for at {asked}, which is not a folder of this machine\n"
                f"set {self.name}.directory to a folder"
            )

    def _check_folder(self) -> None:
        folder = self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(folder, os.W_OK | os.X_OK)
        except OSError as error:
            raise ConfigError(f"{self.name}: {folder} cannot be made: {error}\n{_REMEDY}") from error
        if not writable:
            raise ConfigError(f"{self.name}: {folder} cannot be written\n{_REMEDY}")


_REMEDY = "give another directory, or another project_dir"


class _Silence:
    """Replaces the object of a library that failed to make one: it takes any call."""

    def __getattr__(self, name: str) -> _Silence:
        if name.startswith("__"):  # Python's own questions to an object
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Silence:
        return self


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
