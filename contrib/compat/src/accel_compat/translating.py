"""From the mutable config classes of Accelerate to the frozen ones of accel-core and its backends."""

from __future__ import annotations

import dataclasses
import difflib
import os
from enum import Enum
from importlib import import_module
from typing import Any, ClassVar

from accel_core import PluginError, install_hint

__all__ = ["Spelled", "Translated", "load"]


class Spelled:
    """Base of dataclasses that answer an argument they do not have with the name that was meant."""

    def __new__(cls, *_: Any, **kwargs: Any) -> Any:
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
                raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {name!r}{hint}")
        return super().__new__(cls)


class Translated(Spelled):
    """Base of dataclasses that say which class of ours they stand for, as `module:class`."""

    ours: ClassVar[str]

    def translation(self) -> dict[str, Any]:
        """What it was given, by the names of ours: the fields that differ from a default object's."""
        before = os.environ.copy()
        os.environ.clear()  # what a variable filled was given too
        try:
            default = type(self)()
        finally:
            os.environ.update(before)
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return {
            name: _plain(getattr(self, name))
            for name in names
            if getattr(self, name) != getattr(default, name)
        }

    def to_ours(self) -> object:
        """The same settings, as an object of ours.

        Raises:
            PluginError: the package that has it is not installed.
            ConfigError: it refuses a value.
        """
        return load(self.ours, type(self).__name__)(**self.translation())


def load(path: str, wanted: str) -> Any:
    """The class that `module:class` names, of a package that may not be installed."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        distribution, folder = module.replace("_", "-"), module.removeprefix("accel_").replace("_", "-")
        raise PluginError(
            f"{wanted} needs {distribution}, which is not installed\n{install_hint(f'backends/{folder}')}",
            distribution=distribution,
        ) from error


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
