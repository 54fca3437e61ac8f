"""A strict converter between plain values and typed options.

Plain values are those of YAML, JSON and a shell. Nothing is guessed: "false" is not a bool, 3.9 is
not an int. Only text of a shell (`RawText`) is read by the type of its option.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import attrs
from attrs import Attribute

from accel_core.config.sources import RawText, decimal
from accel_core.contract.arguments import did_you_mean
from accel_core.contract.options import describe, is_secret, masked, options_of
from accel_core.errors import ConfigError

_NAMES: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    timedelta: "a number of seconds",
    Path: "a path",
    list: "a list",
    Mapping: "a mapping",
}


class MismatchError(ValueError):
    """A value is not of its option's type; the message says which type was expected."""


class PartError(MismatchError):
    """A part of a list or mapping is not of its type."""


def convert_option(raw: Any, attribute: Attribute[Any], kind: Any) -> Any:
    """Convert the value of an option, or raise ValueError."""
    if raw is False and _value(attribute.default) == "no":
        raw = "no"  # the bare word, as YAML reads it
    value = convert(raw, kind)
    objection = describe(attribute).objection(value)
    if objection:
        raise ValueError(objection)
    return value


def check_object(config: Any) -> None:
    """Raise ConfigError where an option of a config object is not of its type."""
    for name, (attribute, kind) in options_of(type(config)).items():
        try:
            convert_option(getattr(config, attribute.name), attribute, kind)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{type(config).__name__}({name}=...): {error}\ncorrect this option") from None


def convert(raw: Any, kind: Any) -> Any:
    """Convert `raw` to type `kind`; raise MismatchError where that means guessing."""
    if isinstance(raw, RawText):
        return _from_text(raw, kind)
    if is_union(kind):
        return _first_fit(raw, kind, ((raw, member) for member in get_args(kind)))
    if get_origin(kind) is Annotated:
        return convert(raw, get_args(kind)[0])
    if kind is Any or (kind is object and not isinstance(raw, bool)):  # YAML reads a bare yes as one
        return raw
    if shape(kind) is Mapping and isinstance(raw, Mapping):
        return _convert_mapping(raw, kind)
    if shape(kind) is list and isinstance(raw, (list, tuple, AbstractSet)):
        return _convert_items(raw, kind)
    if attrs.has(kind) and isinstance(raw, Mapping):
        return _convert_section(raw, kind)
    return _exact(raw, kind)


def plain(value: Any) -> Any:
    """Convert a typed value to JSON; `convert` is the inverse.

    An object that no text can hold becomes its name.
    """
    value = _number(_value(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, PurePath):
        return str(value)
    if attrs.has(type(value)):
        return {alias: plain(getattr(value, a.name)) for alias, (a, _) in options_of(type(value)).items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {part.name: plain(getattr(value, part.name)) for part in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {plain(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (Sequence, AbstractSet)) and not isinstance(value, (bytes, bytearray)):
        items = [plain(item) for item in value]
        return sorted(items) if isinstance(value, AbstractSet) else items
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"


def shown(value: Any, secret: bool = False) -> Any:
    """Convert a typed value to JSON, with secrets masked by their option or name."""
    if secret:
        return masked(value, secret)
    if attrs.has(type(value)):
        options = options_of(type(value)).items()
        return {
            alias: shown(getattr(value, a.name), describe(a).secret or is_secret(alias))
            for alias, (a, _) in options
        }
    if isinstance(value, Mapping):
        return {str(key): shown(inner, is_secret(str(key))) for key, inner in value.items()}
    return masked(plain(value))


def flat(tree: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of each value in nested mappings; {} is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{section}{key}.")
        else:
            yield section + key, value


# -- from plain values to types ----------------------------------------------------------------------


def _number(value: Any) -> Any:
    """Return a number of numpy as Python's, and another value as it is."""
    if not isinstance(value, Real) or isinstance(value, (int, float)):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _exact(raw: Any, kind: Any) -> Any:
    number = _number(raw)
    for member in members(kind):
        if raw is member or (type(number) is type(_value(member)) and number == _value(member)):
            return member
    fits = isinstance(number, int) if kind is int else kind is float and isinstance(number, (int, float))
    if fits and not isinstance(number, bool):
        with suppress(OverflowError):  # an int of 310 digits is told below
            return kind(number)
    if kind is timedelta and isinstance(number, (int, float)) and not isinstance(number, bool):
        # .inf, .nan, and what is longer than 2.7 million years, is told below.
        with suppress(OverflowError, ValueError):
            return timedelta(seconds=number)
        raise MismatchError(f"expected a number of seconds, got {raw!r}; unset means the default")
    if kind is Path and isinstance(raw, str):
        return Path(raw)
    is_class = get_origin(kind) is None and isinstance(kind, type)  # 3.10 takes list[int] for a class too
    is_list_of_letters = isinstance(raw, str) and shape(kind) is list  # to Python text is a Sequence
    is_flag = type(raw) is bool and kind is not bool
    if is_class and isinstance(raw, kind) and not (is_list_of_letters or is_flag):
        return raw
    raise _mismatch(raw, kind)


def _first_fit(raw: Any, kind: Any, attempts: Iterable[tuple[Any, Any]]) -> Any:
    within = None
    for attempt in attempts:
        try:
            return convert(*attempt)
        except PartError as error:  # the type fits, but for a part
            within = within or error
        except MismatchError:
            pass
    raise within or _mismatch(raw, kind)


def _convert_part(label: object, raw: Any, kind: Any) -> Any:
    try:
        return convert(raw, kind)
    except MismatchError as error:
        raise PartError(f"{label}: {error}") from None


def _convert_mapping(raw: Mapping[Any, Any], kind: Any) -> Any:
    of_keys, of_values = get_args(kind) or (Any, Any)
    items = {
        _convert_part(f"key {key!r}", key, of_keys): _convert_part(key, inner, of_values)
        for key, inner in raw.items()
    }
    return _constructor(kind, dict)(items)


def _convert_items(raw: Sequence[Any] | AbstractSet[Any], kind: Any) -> Any:
    inner = get_args(kind) or (Any, ...)
    is_fixed = issubclass(get_origin(kind) or kind, tuple) and inner[-1] is not ...
    if is_fixed and len(raw) != len(inner):
        raise _mismatch(raw, kind)
    kinds = inner if is_fixed else inner[:1] * len(raw)
    pairs = enumerate(zip(raw, kinds, strict=True), 1)
    items = [_convert_part(f"item {number}", item, of_item) for number, (item, of_item) in pairs]
    is_set = issubclass(get_origin(kind) or kind, AbstractSet)
    return _constructor(kind, frozenset if is_set else tuple)(items)


def _constructor(kind: Any, otherwise: type) -> Any:
    origin = get_origin(kind) or kind
    return otherwise if inspect.isabstract(origin) else origin


def _convert_section(raw: Mapping[str, Any], kind: type) -> Any:
    options = options_of(kind)
    for key in raw:
        if key not in options:
            raise MismatchError(f"unknown key {key!r}{did_you_mean(str(key), options)}")
    values = {key: _convert_part(key, inner, options[key][1]) for key, inner in raw.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise MismatchError(str(error)) from None


_WORDS: Final = frozenset({"yes", "no", "on", "off", "true", "false", "null"})
"""Words that YAML does not read as text."""


def read_text(text: str) -> Any:
    """Read a shell's text as YAML would read it, or return the text.

    PyYAML, whose import takes 20 ms, is left out for a plain word or number.
    """
    if text.isascii() and text.isidentifier() and text.lower() not in _WORDS:
        return str(text)
    if text.isascii() and text.isdecimal() and text[0] != "0" and len(text) < 19:
        return int(text)
    import yaml

    from accel_core.config.yamlfile import UNREADABLE, Values

    try:
        value = yaml.load(text, Loader=Values)  # noqa: S506  a SafeLoader
    except (yaml.YAMLError, *UNREADABLE, RecursionError):
        return str(text)
    is_text = isinstance(value, str) and text[:1] not in "'\""
    is_comment = value is None and text.strip().lower() != "null"  # or `~`, a shell's home
    return str(text) if is_text or is_comment else value


def _from_text(text: RawText, kind: Any) -> Any:
    # The YAML value of the text comes first, then the text itself: `no` is False for a bool and "no"
    # for a str. A list is neither of both, but a shell's `a,b`.
    attempts = [read_text(text), str(text)]
    if parts := text.parts():  # no items: the text is not a list, rather than the empty one
        attempts += [[read_text(part) for part in parts], list(map(str, parts))]
    return _first_fit(text, kind, ((attempt, kind) for attempt in attempts))


def shape(kind: Any) -> type | None:
    """Return Mapping or list if the type is like one of them."""
    origin = get_origin(kind) or kind
    if not isinstance(origin, type) or issubclass(origin, (str, bytes)):
        return None
    if issubclass(origin, Mapping):
        return Mapping
    return list if issubclass(origin, (Sequence, AbstractSet)) else None


def writable(kind: Any) -> bool:
    """Tell if a file or a shell can hold a value of the type, besides null."""
    held, inner = shape(kind), [arg for arg in get_args(kind) if arg not in (type(None), ...)]
    if is_union(kind):
        return any(map(writable, inner))
    if held is not None:
        hashed = (
            inner if issubclass(get_origin(kind) or kind, AbstractSet) else inner[:-1] * (held is Mapping)
        )
        return all(map(writable, inner)) and not any(map(shape, hashed))
    if get_origin(kind) is Annotated:
        return writable(inner[0])
    return kind in (Any, object, *_NAMES) or bool(members(kind)) or attrs.has(kind)


def is_union(kind: Any) -> bool:
    """Tell if the type is `X | Y` or `Union[X, Y]`."""
    return get_origin(kind) in {Union, types.UnionType}


def members(kind: Any) -> list[Any]:
    """Return the values of a Literal or an enum; empty for other types."""
    if get_origin(kind) == Literal:
        return list(get_args(kind))
    return list(kind) if isinstance(kind, type) and issubclass(kind, Enum) else []


def _value(member: Any) -> Any:
    return member.value if isinstance(member, Enum) else member


# -- what is wrong -----------------------------------------------------------------------------------


def format_value(raw: Any) -> str:
    """Return a value as the user wrote it, in YAML's words."""
    if isinstance(raw, (Mapping, list, tuple)):
        return "a mapping" if isinstance(raw, Mapping) else "a list"
    return json.dumps(raw) if raw is None or isinstance(raw, bool) else repr(raw)


def _mismatch(raw: Any, kind: Any) -> MismatchError:
    accepted = _accepted(kind)
    words = [word for word in accepted if not isinstance(word, type)]
    names = [_NAMES.get(cls, cls.__name__) for cls in accepted if isinstance(cls, type)]
    if words:
        names.append(f"one of {', '.join(map(repr, words))}" if len(words) > 1 else repr(words[0]))
    hint = ""
    if isinstance(raw, bool) and (str in accepted or words):
        hint = "; YAML reads bare yes, no, on and off as true or false: write it in quotes"
    elif isinstance(raw, str):
        hint = _spelling_hint(raw, kind, accepted) or did_you_mean(raw, list(map(str, words)))
    return MismatchError(f"expected {' or '.join(names)}, got {format_value(raw)}{hint}")


def _spelling_hint(raw: str, kind: Any, accepted: Sequence[Any]) -> str:
    """Return the remedy for text that another spelling would make right."""
    number = decimal(raw)
    if number and any(cls in accepted for cls in (int, float, timedelta)):
        return f"; write {number}"
    if isinstance(raw, RawText):  # has no quotes, and is a list without brackets
        return ""
    for other, remedy in ((read_text(raw), "remove the quotes"), ([raw], f"write [{raw}]")):
        with suppress(MismatchError):
            if not isinstance(other, str) and convert(other, kind) is not None:
                return f"; {remedy}"
    return ""


def _accepted(kind: Any) -> list[Any]:
    """Return the types and words that an option of this type takes."""
    if is_union(kind):
        return [word for arg in get_args(kind) if arg is not type(None) for word in _accepted(arg)]
    return [_value(member) for member in members(kind)] or [shape(kind) or kind]
