"""Strict conversion between plain values and typed options.

cattrs converts, with hooks that guess nothing: "false" is not a bool, 3.9 is not an int. Only text without
quotes (`RawText`) is read by the type of its option.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from functools import cache
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin

import attrs

from accel_core.config.sources import RawText
from accel_core.contract.arguments import did_you_mean, quoted
from accel_core.contract.options import Option, is_secret, masked, options_of

if TYPE_CHECKING:
    from cattrs import Converter

_LEAVES: Final[Mapping[Any, tuple[str, Any, Callable[[Any], Any]]]] = {
    type(None): ("null", type(None), lambda _: None),
    bool: ("boolean", bool, bool),
    int: ("integer", Integral, int),
    float: ("number", Real, float),
    str: ("string", str, str),
    Path: ("string", (str, PurePath), Path),
    timedelta: ("number", Real, lambda seconds: timedelta(seconds=float(seconds))),
}
"""Type of an option -> its name in JSON, the types of values that it accepts, and their conversion."""


class MismatchError(ValueError):
    """A value is not of its option's type; the message says which type was expected."""


def convert_option(raw: Any, option: Option) -> Any:
    """Convert the value of an option; raise ValueError if the option does not accept it."""
    value = convert(raw, option.kind)
    if objection := option.objection(value):
        raise ValueError(objection)
    return value


def convert(raw: Any, kind: Any) -> Any:
    """Convert `raw` to type `kind`; raise MismatchError if the conversion would be a guess."""
    problem = None
    for reading in readings(raw):
        try:
            return _structure(reading, kind)
        except MismatchError as error:
            problem = problem or error
    raise problem or _mismatch(raw, kind)


# -- text --------------------------------------------------------------------------------------------

_WORDS: Final = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    "null": None,
    ".inf": math.inf,
    "-.inf": -math.inf,
    ".nan": math.nan,
}
_WHOLE: Final = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_NUMBER: Final = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_COMMA: Final = re.compile(r",(?![^\[{]*[\]}])")
"""A comma that is not within brackets, as in `layers.[0,2].*`."""


def readings(raw: Any) -> Iterator[Any]:
    """Yield the readings of a value: as YAML reads its text, then as text, then as a shell's `a,b`."""
    if not isinstance(raw, RawText):
        yield _read(raw, scalar)
        yield _read(raw, lambda text: None if scalar(text) is None else str(text))
        return
    if raw[:1] in ("[", "{", "'", '"'):
        from accel_core.config.yamlfile import read_text  # PyYAML costs 20 ms; most text is a word or number

        yield from readings(read_text(raw))
    word = scalar(raw)
    yield word
    if word is not None:  # a bare null is never a name
        yield str(raw)
    if parts := [RawText(part.strip()) for part in _COMMA.split(raw) if part.strip()]:
        yield from readings(parts)


def scalar(text: str) -> Any:
    """Read a word or a decimal number as YAML does; return other text unchanged."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    with suppress(ValueError):  # more digits than Python reads
        if _WHOLE.fullmatch(text):
            return int(text)
        if _NUMBER.fullmatch(text):
            return float(text)
    return str(text)


def _read(raw: Any, read: Callable[[str], Any]) -> Any:
    """Read the text in lists and mappings of a file."""
    if type(raw) is list:
        return [_read(item, read) for item in raw]
    if type(raw) is dict:
        return {key: _read(inner, read) for key, inner in raw.items()}
    return read(raw) if isinstance(raw, RawText) else raw


# -- from plain values to types ----------------------------------------------------------------------


def _structure(raw: Any, kind: Any) -> Any:
    if kind in (Any, object) or type(raw) is kind or (is_union(kind) and type(raw) in get_args(kind)):
        return raw  # most values have their type already; the import of cattrs takes 35 ms
    from cattrs import BaseValidationError, StructureHandlerNotFoundError, transform_error

    try:
        return _converter().structure(raw, kind)
    except BaseValidationError as error:
        lines = [line.replace(" @ ", " at ") for line in transform_error(error, "", lambda it, _: str(it))]
        raise MismatchError("; ".join(lines).removesuffix(" at ")) from None
    except StructureHandlerNotFoundError:
        raise MismatchError("can be given in Python only") from None
    except (TypeError, ValueError, AttributeError):  # a leaf, a union, a value without items
        raise _mismatch(raw, kind) from None


@cache
def _converter() -> Converter:
    from cattrs import Converter
    from cattrs.strategies import configure_union_passthrough

    made = Converter()
    for kind in _LEAVES:
        made.register_structure_hook(kind, _leaf)
    made.register_structure_hook_func(lambda kind: kind is object, lambda raw, _: raw)
    made.register_structure_hook_func(is_literal, _literal)
    configure_union_passthrough(bool | int | float | str | None, made)
    lists = made.copy()  # cattrs would read text as a list of letters
    made.register_structure_hook_func(
        lambda kind: shape(kind) is list, lambda raw, kind: lists.structure(_list(raw), kind)
    )
    return made


def _leaf(raw: Any, kind: Any) -> Any:
    if kind not in _LEAVES:  # an enum whose members are text or numbers
        return kind(raw)
    _, accepts, make = _LEAVES[kind]
    value = _value(raw)
    if isinstance(value, accepts) and (kind is bool or not isinstance(value, bool)):
        with suppress(OverflowError, ValueError):  # .nan seconds, a float of 310 digits
            return make(value)
    raise _mismatch(raw, kind)


def _literal(raw: Any, kind: Any) -> Any:
    if (type(raw), raw) not in [(type(member), member) for member in get_args(kind)]:  # True is not 1
        raise _mismatch(raw, kind)
    return raw


def _list(raw: Any) -> Any:
    if not isinstance(raw, (list, tuple, AbstractSet)):
        raise TypeError(f"expected array, got {quoted(raw)}")
    return raw


def _mismatch(raw: Any, kind: Any) -> MismatchError:
    parts = [it for it in schema(kind).get("anyOf", [schema(kind)]) if it.get("type") != "null"]
    words = [word for part in parts for word in part.get("enum", ())]
    names = [part.get("type", "an object of Python") for part in parts if "enum" not in part]
    names += [f"one of {', '.join(map(repr, words))}"] if words else []
    hint = did_you_mean(raw, list(map(str, words))) if isinstance(raw, str) else ""
    return MismatchError(f"expected {' or '.join(names)}, got {'null' if raw is None else quoted(raw)}{hint}")


# -- types -------------------------------------------------------------------------------------------


def schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type."""
    if is_union(kind):
        return {"anyOf": [schema(member) for member in get_args(kind)]}
    if members(kind):
        return {"enum": [_value(member) for member in members(kind)]}
    if shape(kind) is list:
        return {"type": "array", "items": schema((*get_args(kind), Any)[0])}
    if shape(kind) is Mapping:
        return {"type": "object", "additionalProperties": schema((*get_args(kind), Any, Any)[1])}
    return {"type": _LEAVES[kind][0]} if kind in _LEAVES else {}


def shape(kind: Any) -> type | None:
    """Return Mapping for mappings, list for sequences (not text) and sets, and None for other types."""
    origin = get_origin(kind) or kind
    if not isinstance(origin, type) or issubclass(origin, (str, bytes)):
        return None
    if issubclass(origin, Mapping):
        return Mapping
    return list if issubclass(origin, (Sequence, AbstractSet)) else None


def is_union(kind: Any) -> bool:
    """Return True if the type is `X | Y` or `Union[X, Y]`."""
    return get_origin(kind) in (Union, types.UnionType)


def is_literal(kind: Any) -> bool:
    """Return True if the type is `Literal[...]`."""
    return get_origin(kind) is Literal


def members(kind: Any) -> list[Any]:
    """Return the values of a Literal or an enum; empty for other types."""
    if is_literal(kind):
        return list(get_args(kind))
    return list(kind) if isinstance(kind, type) and issubclass(kind, Enum) else []


def _value(member: Any) -> Any:
    return member.value if isinstance(member, Enum) else member


# -- from types to plain values ----------------------------------------------------------------------


def plain(value: Any, *, masks: bool = False) -> Any:
    """Convert a typed value to JSON values; `convert` is the inverse.

    An object that text cannot hold becomes its name. With `masks`, secrets are masked, by their option or
    name.
    """
    value = _value(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return masked(value) if masks else value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, PurePath):
        return str(value)
    if attrs.has(type(value)):
        options = options_of(type(value)).values()
        return {it.name: _inner(getattr(value, it.attribute), masks, it.secret) for it in options}
    if isinstance(value, Mapping):
        return {str(key): _inner(inner, masks, is_secret(str(key))) for key, inner in value.items()}
    if isinstance(value, (Sequence, AbstractSet)) and not isinstance(value, (bytes, bytearray)):
        items = [plain(item, masks=masks) for item in value]
        return sorted(items) if isinstance(value, AbstractSet) else items
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"


def _inner(value: Any, masks: bool, secret: bool) -> Any:
    inner = plain(value, masks=masks)
    return masked(inner, secret) if masks and secret else inner


def flat(tree: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of each value in nested mappings; {} is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{section}{key}.")
        else:
            yield section + key, value
