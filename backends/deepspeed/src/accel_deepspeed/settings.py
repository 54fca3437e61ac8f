"""DeepSpeed's JSON: its sources, and its keys by dotted path."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["AUTO", "autos", "fill", "get", "put", "read"]

AUTO: Final = "auto"
"""The value of a key that is filled in when it becomes known."""

_ABSENT: Final = object()


def read(given: Any) -> dict[str, Any] | None:
    """Read settings from a mapping, JSON file, base64 text or object with `config`.

    Raises:
        ValueError: there is no such file, or it holds no JSON.
        TypeError: it is none of these.
    """
    given = getattr(given, "config", given)
    if given is None:
        return None
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"hf_ds_config is a {type(given).__name__}; give a mapping, or the path of a JSON file"
        )
    path = Path(given).expanduser()
    return _parsed(_text(path, str(given)), str(path))


def _text(path: Path, given: str) -> str:
    if path.is_file():
        return path.read_text(encoding="utf-8")
    try:
        text = base64.urlsafe_b64decode(given).decode()
    except (binascii.Error, UnicodeDecodeError):
        text = ""
    if not text.lstrip().startswith("{"):
        raise ValueError(f"hf_ds_config: there is no file {given} (nor is that a mapping, or one in base64)")
    return text


def _parsed(text: str, origin: str) -> dict[str, Any]:
    try:
        found = _loads()(text, object_pairs_hook=_once)
    except ValueError as error:
        raise ValueError(f"hf_ds_config: {origin} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TypeError(f"hf_ds_config: {origin} holds a {type(found).__name__}, not a mapping")
    return found


def _loads() -> Callable[..., Any]:
    try:
        from hjson import loads  # DeepSpeed's own reader: JSON with comments
    except ImportError:
        return json.loads
    return loads  # type: ignore[no-any-return]


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} stands there twice")
    return dict(pairs)


def get(settings: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path."""
    found: Any = settings
    for key in path.split("."):
        found = found.get(key, _ABSENT) if isinstance(found, Mapping) else _ABSENT
    return default if found is _ABSENT else found


def put(settings: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, making the sections it stands in."""
    *sections, key = path.split(".")
    for section in sections:
        settings = settings.setdefault(section, {})
    settings[key] = value


def autos(settings: Mapping[str, Any]) -> list[str]:
    """Return the paths that are still "auto"."""
    return [path for path, value in _leaves(settings) if value == AUTO]


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def fill(
    settings: dict[str, Any], values: Mapping[str, tuple[Any, str]], *, must_match: bool = True
) -> list[str]:
    """Replace "auto" by values (path -> value, its origin).

    Return one line per mismatch.
    """
    mismatches = []
    for path, (value, origin) in values.items():
        found = get(settings, path, _ABSENT)
        if found == AUTO:
            put(settings, path, value)
        elif must_match and found not in (_ABSENT, None, value):
            mismatches.append(f"{path} is {found!r} in the DeepSpeed config, but {value!r} by {origin}")
    return mismatches
