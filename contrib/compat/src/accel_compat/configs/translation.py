"""Accelerate's mutable config classes, made from and translated to accel-core's."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs

from accel_compat.environment.variables import clear_environment
from accel_compat.packages import load

T = TypeVar("T")


class Spelled:
    """Base of dataclasses whose error for an unknown argument names the closest one."""

    if TYPE_CHECKING:  # `fields_of` makes the fields

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __new__(cls, *_: Any, **kwargs: Any) -> Any:
        known = field_names(cls)
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
                raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {name!r}{hint}")
        return super().__new__(cls)


class Translated(Spelled):
    """Base of dataclasses that stand for a class of ours, named as `module:class`."""

    ours: ClassVar[str]

    def translation(self) -> dict[str, Any]:
        """Return the fields that differ from a default object's, by the names of ours."""
        with clear_environment():  # a value that a variable filled was given too
            default = type(self)()
        return {
            name: _plain(getattr(self, name))
            for name in field_names(type(self))
            if getattr(self, name) != getattr(default, name)
        }

    def to_ours(self) -> object:
        """Make an object of ours with the same settings.

        Raises:
            PluginError: the package that has it is not installed.
            ConfigError: it refuses a value.
        """
        return load(self.ours, type(self).__name__)(**self.translation())


def ours_of(thing: Any) -> Any:
    """Return the object of ours that says the same; any other thing as it is."""
    return thing.to_ours() if hasattr(thing, "to_ours") else thing


def fields_of(path: str, *, without: Collection[str] = (), **defaults: Any) -> Callable[[type[T]], type[T]]:
    """Make the decorated class a dataclass with the fields of a config class of ours.

    defaults: where Accelerate's differ.
    """

    def make(cls: type[T]) -> type[T]:
        fields = [field for field in attrs.fields(load(path, cls.__name__)) if field.name not in without]
        cls.__annotations__ = {field.name: field.type for field in fields}
        for field in fields:
            default = defaults.get(field.name, field.default)
            if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
                default = dataclasses.field(default_factory=default.factory)
            setattr(cls, field.name, default)
        cls.ours = path  # type: ignore[attr-defined]
        return dataclasses.dataclass(cls)

    return make


def field_names(cls: Any) -> list[str]:
    """List a dataclass's fields; of another class, none."""
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
