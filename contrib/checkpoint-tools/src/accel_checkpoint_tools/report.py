"""A comparison as lines for people, and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final

from attrs import asdict

from accel_checkpoint_tools.diff import ABSENT, Comparison, TensorPair, ValuePair
from accel_checkpoint_tools.measure import Difference
from accel_core import Stored

__all__ = ["as_plain", "lines", "told", "value_lines"]

_WIDTH: Final = 60
"""Columns of a value that is shown."""


def lines(found: Comparison) -> Iterator[str]:
    """Yield the differences, section by section; one line if there is none."""
    if not found.values and not any(pair.differs for pair in found.tensors):
        yield "no difference"
        return
    yield f"A  {found.a}"
    yield f"B  {found.b}"
    for section in found.sections:
        pairs = [pair for pair in found.tensors if pair.section == section]
        differing = [pair for pair in pairs if pair.differs]
        values = [*value_lines([value for value in found.values if value.section == section])]
        if not differing and not values:
            continue
        count = f": {len(differing)} of {len(pairs)} tensors differ" if pairs else ""
        note = "" if section in found.decisive else " (told only: does not change the exit status)"
        yield ""
        yield f"{section}{count}{note}"
        width = max((len(f"{pair.key[0]}  {pair.name}") for pair in differing), default=0)
        for pair in differing:
            name = f"{pair.key[0]}  {pair.name}"
            yield f"  {name:<{width}}  {told(pair)}"
        yield from (f"  {line}" for line in values)


def told(pair: TensorPair) -> str:
    """Return in words how a tensor differs."""
    return ", ".join(filter(None, [pair.problem, _measures(pair.difference)]))


def _measures(difference: Difference | None) -> str:
    if difference is None:
        return ""
    count = f"{difference.different} of {difference.elements} elements"
    if difference.max_abs is None:
        return count
    return (
        f"max {difference.max_abs:.3g}  relative {difference.relative:.3g}  "
        f"cosine {difference.cosine:.9g}  {count}"
    )


def value_lines(values: list[ValuePair]) -> Iterator[str]:
    """Yield a line for each value; what is alike of several parameters is one line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for value in values:
        path, name = _without_parameter(value.path)
        alike.setdefault((path, _change(value)), []).append(name)
    for (path, change), names in alike.items():
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        yield f"{path}: {change}" + (f" ({len(names)} parameters: {shown})" if names[0] else "")


def _without_parameter(path: str) -> tuple[str, str]:
    """Return the path of a hyperparameter without its parameter, and that, or "".

    A parameter's name may have dots, and a hyperparameter's has none.
    """
    unit, marker, rest = path.partition(".parameters.")
    name, _, option = rest.rpartition(".")
    return (f"{unit}.{option}", name) if marker and name else (path, "")


def _change(value: ValuePair) -> str:
    if value.difference is None:
        return f"{_shown(value.a)} -> {_shown(value.b)}"
    if value.section == "random":  # bytes, whose distance means nothing
        return f"{value.difference.different} of {value.difference.elements} bytes"
    return _measures(value.difference)


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "(absent)"
    text = json.dumps(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 4]} ..."


def as_plain(found: Comparison) -> dict[str, Any]:
    """Return the comparison as what `json.dumps` takes; infinities and NaN are text."""
    return {
        "a": str(found.a),
        "b": str(found.b),
        "differs": found.differs,
        "decisive": [section for section in found.sections if section in found.decisive],
        "compared": len(found.tensors),
        "tensors": [_plain_pair(pair) for pair in found.tensors if pair.differs],
        "values": [
            {
                "section": value.section,
                "path": value.path,
                **{side: each for side, each in (("a", value.a), ("b", value.b)) if each is not ABSENT},
                "difference": _plain(value.difference),
            }
            for value in found.values
        ],
    }


def _plain_pair(pair: TensorPair) -> dict[str, Any]:
    about = {"unit": pair.key[0], "section": pair.section, "name": pair.name, "problem": pair.problem}
    return {**about, "a": _described(pair.a), "b": _described(pair.b), "difference": _plain(pair.difference)}


def _described(tensor: Stored | None) -> dict[str, Any] | None:
    return None if tensor is None else {"shape": list(tensor.shape), "dtype": tensor.dtype}


def _plain(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(difference).items()
    }
