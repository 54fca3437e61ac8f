"""The common shape of the classes that know a library."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from accel_core import ConfigError

if TYPE_CHECKING:
    from accel_trackers.options import TrackerConfig

__all__ = ["Library"]


class Library(ABC):
    """A library's run, and the calls that log to it.

    The methods take a library's own arguments where they have `**options`. They raise the library's errors.

    handle: the library's object for a run, from `open` on.
    """

    module: ClassVar[str]
    """The library's name for `import`."""
    offline_environment: ClassVar[Mapping[str, str]] = {}
    """Variables that keep the library from the network, set before its import."""
    takes_addresses: ClassVar[bool] = False
    """True if `directory` may be an address, NAME://PLACE."""
    handle: Any = None

    @cached_property
    def library(self) -> Any:
        """The library's module."""
        return import_module(self.module)

    def prepare(self, config: TrackerConfig, folder: Path) -> None:
        """Set what must be set before the library is imported."""
        if config.offline:
            os.environ.update(self.offline_environment)

    def check_project(self, project: str) -> None:
        """Raise ConfigError for a name that the library refuses."""
        if not project or not project.strip():
            raise ConfigError(f"{self.module}: the project is {project!r}\ngive init_trackers a name for it")

    @abstractmethod
    def starter(self) -> Callable[..., Any]:
        """The library's function that `open` calls with its arguments."""

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise ConfigError for a name that `starter` does not take."""
        known = [
            name
            for name, parameter in inspect.signature(self.starter()).parameters.items()
            if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        for name in arguments:
            if name not in known:
                close = get_close_matches(name, known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ConfigError(
                    f"init_kwargs: {self.module} takes no {name!r}{hint}\n"
                    f"give it arguments of {', '.join(known)}"
                )

    @abstractmethod
    def arguments(self, config: TrackerConfig, folder: Path, run_id: str, *, resumed: bool) -> dict[str, Any]:
        """The arguments of `open` for these options.

        resumed: there is a run of that id.
        """

    @abstractmethod
    def open(self, project: str, **arguments: Any) -> None:
        """Begin the run, or continue it."""

    def run_id(self, asked: str) -> str:
        """The id by which `arguments` finds the run again.

        asked: the id that it was given.
        """
        return asked

    @abstractmethod
    def configure(self, values: Mapping[str, Any]) -> None:
        """Note the settings of the run."""

    def parts(self, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Split numbers and texts into parts.

        `log` takes a part as a whole or, if it raises, not at all.
        """
        return [{name: value} for name, value in values.items()]

    @abstractmethod
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log numbers and texts by name."""

    def end_log(self) -> None:  # noqa: B027  most libraries count no steps by themselves
        """Go on to the next step, after the last of the values that belong together."""

    @abstractmethod
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log lists of images by name."""

    @abstractmethod
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Log a table, of columns and rows or of a dataframe."""

    @abstractmethod
    def log_file(self, path: Path, name: str) -> None:
        """Keep a copy of a file."""

    @abstractmethod
    def log_reference(self, name: str, facts: Mapping[str, Any]) -> None:
        """Note where a folder lies: `uri`, and `bytes` and number of its `files`."""

    def flush(self) -> None:  # noqa: B027  most libraries write at once, and some only at the end
        """Write what was logged, as a checkpoint is about to be saved."""

    @abstractmethod
    def close(self) -> None:
        """End the run, with all that was logged on disk or sent."""
