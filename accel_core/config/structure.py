"""Plain values, as YAML, JSON or a shell gives them, into typed options, by a strict converter; and back.

Nothing is guessed: "false" is no bool, 3.9 no int. Only text from a shell (`Text`) is read by the
type it is meant for. Imported when the first value has to be read: cattrs costs 50 ms.
"""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import attrs
from cattrs import BaseValidationError, Converter
from cattrs.gen import make_mapping_structure_fn

from accel_core.config.sources import Text, decimal, show
from accel_core.contract.options import describe, is_secret, masked, options_of
from accel_core.contract.suggest import did_you_mean

__all__ = ["MismatchError", "convert", "flat", "is_union", "members", "plain", "shape", "shown", "writable"]

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
    """A value is not of its option's type; the message says what was expected and found."""


def convert(raw: Any, kind: Any) -> Any:
    """`raw` as a value of type `kind`.

    Raises:
        MismatchError: it is not one.
    """
    if isinstance(raw, Text):
        return _from_text(raw, kind)
    try:
        return _CONVERTER.structure(raw, kind)
    except BaseValidationError as error:
        raise MismatchError(_first_of(error)) from None


def plain(value: Any) -> Any:
    """A typed value as JSON holds it: `convert` gives the value back.

    What no text can hold becomes its name.
    """
    return _CONVERTER.unstructure(value)


def shown(value: Any, secret: bool = False) -> Any:
    """The same for people and files: what is secret by its option or its name is masked."""
    if secret:
        return masked(value, secret)
    if attrs.has(type(value)):
        options = options_of(type(value)).items()
        return {
            alias: shown(getattr(value, a.name), describe(a).secret or is_secret(alias))
            for alias, (a, _) in options
        }
    if isinstance(value, Mapping):
        return {str(key): shown(each, is_secret(str(key))) for key, each in value.items()}
    return masked(plain(value))


def flat(tree: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of each value in nested mappings, an empty one being a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{section}{key}.")
        else:
            yield section + key, value


# -- the converter: cattrs takes values and types apart, these hooks say what it may accept ----------


def _exact(raw: Any, kind: Any) -> Any:
    for member in members(kind):
        if raw is member or (type(raw) is type(_value(member)) and raw == _value(member)):
            return member
    if kind is float and type(raw) is int:
        return float(raw)
    if kind is timedelta and type(raw) in (int, float):
        return _seconds(raw)
    if kind is Path and isinstance(raw, str):
        return Path(raw)
    plain_type = get_origin(kind) is None and isinstance(kind, type)  # 3.10 takes list[int] for a type too
    if plain_type and isinstance(raw, kind) and (type(raw) is not bool or kind is bool):
        return raw
    raise _mismatch(raw, kind)


def _seconds(raw: float) -> timedelta:
    try:
        return timedelta(seconds=raw)
    except (OverflowError, ValueError):  # .inf and what is longer than 2.7 million years; .nan
        raise MismatchError(f"expected a number of seconds, got {raw!r}; unset means the default") from None


def _union(raw: Any, kind: Any) -> Any:
    return _first_fit(((raw, member) for member in get_args(kind)), _mismatch(raw, kind))


def _first_fit(attempts: Iterable[tuple[Any, Any]], mismatch: MismatchError) -> Any:
    for raw, kind in attempts:
        try:
            return _CONVERTER.structure(raw, kind)
        except (MismatchError, BaseValidationError):
            continue
    raise mismatch


def _container(kind: Any) -> Callable[[Any, Any], Any]:
    # cattrs would take the letters of a text for items, and the keys of a mapping.
    wanted: Any = (list, tuple, AbstractSet)
    inner: Callable[[Any, Any], Any]
    if shape(kind) is Mapping:  # asked for its own hook of a mapping, cattrs puts that in the place of ours
        wanted, inner = Mapping, make_mapping_structure_fn(kind, _CONVERTER)
    else:
        _unguarded.kind = kind
        inner = _CONVERTER.get_structure_hook(kind, cache_result=False)
        _unguarded.kind = None

    def guarded(raw: Any, kind: Any) -> Any:
        if isinstance(raw, wanted):
            return inner(raw, kind)
        raise _mismatch(raw, kind)

    return guarded


def _is_container(kind: Any) -> bool:
    return kind is not getattr(_unguarded, "kind", None) and shape(kind) is not None


def shape(kind: Any) -> type | None:
    """Mapping or list, if the type is like one of them."""
    origin = get_origin(kind) or kind
    if not isinstance(origin, type) or issubclass(origin, (str, bytes)):
        return None
    if issubclass(origin, Mapping):
        return Mapping
    return list if issubclass(origin, (Sequence, AbstractSet)) else None


def writable(kind: Any) -> bool:
    """Whether a file or a shell can hold a value of the type, besides null."""
    held, inner = shape(kind), [it for it in get_args(kind) if it not in (type(None), ...)]
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
    """Whether it is `X | Y`, spelt so or not."""
    return get_origin(kind) in {Union, types.UnionType}


def members(kind: Any) -> list[Any]:
    """The values that there are of a Literal or an enum; none of another type."""
    if get_origin(kind) == Literal:
        return list(get_args(kind))
    return list(kind) if isinstance(kind, type) and issubclass(kind, Enum) else []


def _value(it: Any) -> Any:
    return it.value if isinstance(it, Enum) else it


def _section(it: Any) -> dict[str, Any]:
    return {alias: plain(getattr(it, a.name)) for alias, (a, _) in options_of(type(it)).items()}


def _named(it: Any) -> str:
    return f"{getattr(it, '__module__', '')}.{getattr(it, '__qualname__', type(it).__name__)}"


_unguarded: Final = threading.local()  # the type whose own hook is being made
_CONVERTER: Final = Converter(
    forbid_extra_keys=True,
    structure_fallback_factory=lambda _: _exact,
    unstructure_fallback_factory=lambda _: _named,
    unstruct_collection_overrides={Sequence: list, AbstractSet: sorted},
)
for _kind in (bool, int, float, str, Path, type(None)):
    _CONVERTER.register_structure_hook(_kind, _exact)
    _CONVERTER.register_unstructure_hook(_kind, _value)
_CONVERTER.register_structure_hook_func(lambda kind: bool(members(kind)), _exact)
_CONVERTER.register_structure_hook_func(is_union, _union)
_CONVERTER.register_structure_hook_factory(_is_container, _container)
_CONVERTER.register_unstructure_hook(Path, str)
_CONVERTER.register_unstructure_hook(timedelta, timedelta.total_seconds)
_CONVERTER.register_unstructure_hook_func(attrs.has, _section)


# -- text of a shell ---------------------------------------------------------------------------------


def _from_text(text: Text, kind: Any) -> Any:
    # What the text looks like first, then the text itself: `no` is False for a bool, "no" for a
    # str, and both for neither a list, where a shell's `a,b` is meant.
    from accel_core.config.yamlfile import looks_like  # PyYAML costs 30 ms

    attempts = [looks_like(text), str(text)]
    if parts := text.parts():  # no items: the text is not a list, rather than the empty one
        attempts += [[looks_like(part) for part in parts], list(map(str, parts))]
    return _first_fit(((attempt, kind) for attempt in attempts), _mismatch(text, kind))


# -- what is wrong -----------------------------------------------------------------------------------


def _first_of(error: BaseException) -> str:
    """The first mistake in cattrs's tree of them, behind the items it lies in."""
    if not isinstance(error, BaseValidationError):
        return str(error)
    inner = error.exceptions[0]
    index = next((note.index for note in getattr(inner, "__notes__", ()) if hasattr(note, "index")), None)
    label = f"item {index + 1}" if isinstance(index, int) else index
    return f"{label}: {_first_of(inner)}" if label is not None else _first_of(inner)


def _mismatch(raw: Any, kind: Any) -> MismatchError:
    accepted = _accepted(kind)
    words = [each for each in accepted if not isinstance(each, type)]
    names = [_NAMES.get(each, each.__name__) for each in accepted if isinstance(each, type)]
    if words:
        names.append(f"one of {', '.join(map(repr, words))}" if len(words) > 1 else repr(words[0]))
    hint = did_you_mean(raw, [str(word) for word in words]) if isinstance(raw, str) else ""
    if isinstance(raw, bool) and (str in accepted or words):
        hint = "; YAML reads bare yes, no, on and off as true or false: write it in quotes"
    elif isinstance(raw, Text):  # has no quotes, where the text of a file has
        hint = _plainly(raw, accepted) or hint
    elif isinstance(raw, str):
        hint = _hint(raw, accepted) or hint
    return MismatchError(f"expected {' or '.join(names)}, got {show(raw)}{hint}")


def _plainly(raw: str, accepted: Sequence[Any]) -> str:
    numbers = {int, float, timedelta}.intersection(it for it in accepted if isinstance(it, type))
    return f"; write {plainly}" if numbers and (plainly := decimal(raw)) else ""


def _is_number(raw: str) -> bool:
    try:
        return math.isfinite(float(raw))
    except ValueError:
        return False


def _hint(raw: str, accepted: Sequence[Any]) -> str:
    if plainly := _plainly(raw, accepted):
        return plainly
    if _is_number(raw) and (int in accepted or float in accepted):
        return "; remove the quotes"
    if raw in ("true", "false") and bool in accepted:
        return "; remove the quotes"
    return f"; write [{raw}]" if list in accepted else ""


def _accepted(kind: Any) -> list[Any]:
    """The types and words that an option of this type takes."""
    if is_union(kind):
        return [each for it in get_args(kind) if it is not type(None) for each in _accepted(it)]
    return [_value(member) for member in members(kind)] or [shape(kind) or kind]
