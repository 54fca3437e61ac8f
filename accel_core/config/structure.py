"""Plain values, as YAML, JSON or a shell gives them, into typed options, strictly; and back.

Nothing is guessed: "false" is no bool, 3.9 no int. Only text from a shell (`Text`) is read by the
type it is meant for.
"""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import attrs
from attrs import NOTHING, Attribute

from accel_core.config.options import default_of, describe
from accel_core.plugins import near

__all__ = ["MismatchError", "Text", "convert", "leaves", "options_of", "plain", "section_class"]

Path = tuple[str, ...]

_NUMBER: Final = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_NAMES: Final = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


class Text(str):
    """A value from the environment or a flag: read by the type it is meant for."""

    __slots__ = ()


class MismatchError(Exception):
    """A value is not of its option's type; the message says what was expected and found."""


def options_of(cls: type) -> Mapping[str, tuple[Attribute[Any], Any]]:
    """Name -> (attrs field, resolved type) of a config class; a python_only option's type is Any."""
    return _options_of(cls)


@cache
def _options_of(cls: Any) -> Mapping[str, tuple[Attribute[Any], Any]]:
    found = {}
    for attribute in attrs.fields(cls):
        if not attribute.init:
            continue
        kind = attribute.type
        if describe(attribute).python_only:
            kind = Any  # may name what only type checkers import
        elif isinstance(kind, str):
            home = next(c for c in cls.__mro__ if attribute.name in vars(c).get("__annotations__", ()))
            named = types.SimpleNamespace(__annotations__={"it": kind})
            kind = get_type_hints(named, vars(sys.modules[home.__module__]))["it"]
        found[attribute.alias] = (attribute, kind)
    return found


def section_class(kind: Any) -> type | None:
    """The attrs class behind an option that is itself a section, `X` or `X | None`."""
    candidates = [kind, *(get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ())]
    return next((c for c in candidates if isinstance(c, type) and attrs.has(c)), None)


def convert(raw: Any, kind: Any) -> Any:
    """`raw` as a value of type `kind`.

    Raises:
        MismatchError: it is not one.
    """
    if isinstance(raw, Text):
        return _from_text(str(raw), kind)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _first(raw, kind)
    if origin is Literal:
        if raw in get_args(kind) and any(type(raw) is type(choice) for choice in get_args(kind)):
            return raw
        raise _mismatch(raw, kind)
    if origin in _CONTAINERS:
        return _CONTAINERS[origin](raw, kind)
    return _scalar(raw, kind)


def _scalar(raw: Any, kind: Any) -> Any:
    if kind is Any or kind is object:
        return raw
    if kind is float and type(raw) is int:
        return float(raw)
    if kind is timedelta and type(raw) in (int, float):
        return timedelta(seconds=raw)
    if isinstance(kind, type):
        if isinstance(raw, kind) and not (isinstance(raw, bool) and kind in (int, float)):
            return raw
        if issubclass(kind, Enum) and any(member.value == raw for member in kind):
            return kind(raw)
    raise _mismatch(raw, kind)


def _first(raw: Any, kind: Any) -> Any:
    value = next((v for member in get_args(kind) if (v := _attempt(raw, member)) is not NOTHING), NOTHING)
    if value is NOTHING:
        raise _mismatch(raw, kind)
    return value


def _attempt(raw: Any, kind: Any) -> Any:
    try:
        return convert(raw, kind)
    except MismatchError:
        return NOTHING


def _sequence(raw: Any, kind: Any) -> Any:
    if isinstance(raw, str) or not isinstance(raw, Sequence):
        raise _mismatch(raw, kind)
    kinds = get_args(kind) or (Any, ...)
    if get_origin(kind) is not tuple or Ellipsis in kinds:
        kinds = (kinds[0],) * len(raw)
    if len(kinds) != len(raw):
        raise MismatchError(f"expected a list of {len(kinds)}, got one of {len(raw)}")
    values = [
        _item(f"item {number}", each, item)
        for number, (each, item) in enumerate(zip(raw, kinds, strict=True), 1)
    ]
    return values if get_origin(kind) is list else tuple(values)


def _mapping(raw: Any, kind: Any) -> dict[Any, Any]:
    if not isinstance(raw, Mapping):
        raise _mismatch(raw, kind)
    key_kind, value_kind = get_args(kind) or (Any, Any)
    return {_item("key", key, key_kind): _item(str(key), each, value_kind) for key, each in raw.items()}


def _item(label: str, raw: Any, kind: Any) -> Any:
    try:
        return convert(raw, kind)
    except MismatchError as mismatch:
        raise MismatchError(f"{label}: {mismatch}") from None


_CONTAINERS: Final[Mapping[Any, Callable[[Any, Any], Any]]] = {
    tuple: _sequence,
    list: _sequence,
    Sequence: _sequence,
    dict: _mapping,
    Mapping: _mapping,
}


def _from_text(text: str, kind: Any) -> Any:
    # What the text looks like first, then the text itself: `no` is False for a bool, "no" for a
    # str, and both for neither a list, where a shell's `a,b` is meant.
    attempts: list[Any] = [_looks_like(text), text]
    if "[" not in text:
        attempts.append([Text(part.strip()) for part in text.split(",") if part.strip()])
    value = next((v for attempt in attempts if (v := _attempt(attempt, kind)) is not NOTHING), NOTHING)
    if value is NOTHING:
        raise _mismatch(text, kind)
    return value


def _looks_like(text: str) -> Any:
    import yaml

    if _NUMBER.fullmatch(text) and "e" in text.lower():
        return float(text)  # YAML 1.1 takes 1e-4 for text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, str) and text[:1] not in "'\"" else value


def _mismatch(raw: Any, kind: Any) -> MismatchError:
    message = f"expected {_name(kind)}, got {show(raw)}"
    accepts = set(get_args(kind)) | {kind}
    choices = _choices(kind)
    if isinstance(raw, bool) and (str in accepts or choices):
        message += "; YAML reads bare yes, no, on and off as true or false: write it in quotes"
    elif isinstance(raw, str) and accepts & {int, float} and _NUMBER.fullmatch(raw):
        if "e" in raw.lower():
            message += f"; YAML reads {raw} as text: write {float(raw)!r}" if "." in repr(float(raw)) else ""
        else:
            message += "; remove the quotes"
    elif raw in ("true", "false") and bool in accepts:
        message += "; remove the quotes"
    elif isinstance(raw, str) and get_origin(kind) in (tuple, list, Sequence):
        message += f"; write [{raw}]"
    elif isinstance(raw, str):
        message += near(raw, choices)
    return MismatchError(message)


def _choices(kind: Any) -> list[str]:
    """The words that an option of this type takes, if they are counted."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(member.value) for member in kind]
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return [choice for member in get_args(kind) for choice in _choices(member)]


def _name(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(repr(member.value) for member in kind)}"
    if origin in (Union, types.UnionType):
        return " or ".join(_name(member) for member in arguments if member is not type(None))
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}" if len(arguments) > 1 else repr(arguments[0])
    if origin in (tuple, list, Sequence):
        return "a list"
    if origin in (dict, Mapping):
        return "a mapping"
    if kind is timedelta:
        return "a number of seconds"
    return _NAMES.get(kind) or str(getattr(kind, "__name__", kind))


def show(raw: Any) -> str:
    """A value as its user wrote it, in an error."""
    if isinstance(raw, Mapping):
        return "a mapping"
    if isinstance(raw, (list, tuple)):
        return "a list"
    return json.dumps(raw) if raw is None or isinstance(raw, bool) else repr(raw)


def plain(value: Any) -> Any:
    """A typed value as JSON holds it: `convert` gives the value back.

    What no text can hold becomes its name.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if attrs.has(type(value)):
        return {alias: plain(getattr(value, a.name)) for alias, (a, _) in options_of(type(value)).items()}
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"


def leaves(instance: object, path: Path = (), *, changed: bool = False) -> Iterator[tuple[Path, Any]]:
    """(path, value) of each option of a config object, sections within it entered.

    changed: only those that differ from their class's default.
    """
    for alias, (attribute, kind) in options_of(type(instance)).items():
        value = getattr(instance, attribute.name)
        if section_class(kind) and attrs.has(type(value)):
            yield from leaves(value, (*path, alias), changed=changed)
        elif not changed or value != default_of(attribute, instance):
            yield (*path, alias), value
