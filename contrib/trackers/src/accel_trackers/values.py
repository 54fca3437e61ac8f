"""Logged values in the forms that libraries take."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Number
from pathlib import Path
from typing import Any

from torch import Tensor

from accel_core import AccelError

__all__ = [
    "as_csv",
    "as_identifier",
    "as_images",
    "described",
    "flat",
    "is_finite",
    "leads_out",
    "plain",
    "real",
]


def flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each value, `OUTER/INNER` in nested mappings.

    Raises:
        AccelError: two have one name.
    """
    names: set[str] = set()
    for name, value in _joined(values, ""):
        if name in names:
            raise AccelError(
                f"two values are called {name!r:.80}, and one would be lost\ngive them other names"
            )
        names.add(name)
        yield name, value


def _joined(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _joined(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def plain(value: Any) -> Any:
    """A setting as JSON has it; text for other objects.

    Whole numbers of more than 64 bits are text too: some libraries lose all settings for one.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def real(value: Any) -> Any:
    """An int or a float for a number of another kind, such as a Decimal."""
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Number):
        with suppress(TypeError, ValueError, OverflowError):  # a complex number, or one beyond a float
            return float(value)  # type: ignore[arg-type]
    return value


def is_finite(value: Any) -> bool:
    """False for nan and the infinities."""
    return not isinstance(value, float) or math.isfinite(value)


def leads_out(name: str) -> bool:
    """True if a file of that name, joined to a folder, would lie outside it."""
    parts = Path(name).parts
    return not parts or Path(name).is_absolute() or ".." in parts


def as_images(images: Any) -> list[Any]:
    """A list of images, for one or several; tensors become arrays."""
    several = images if isinstance(images, (list, tuple)) else [images]
    return [image.detach().cpu().numpy() if isinstance(image, Tensor) else image for image in several]


def as_identifier(name: str) -> str:
    """A name of ASCII letters, digits and "_.-", as some libraries want them."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:128] or "artifact"


def as_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as comma-separated values, with its header."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def described(folder: Path) -> dict[str, Any]:
    """The facts by which a folder is referenced: its URI, and the bytes of its files."""
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {"uri": folder.resolve().as_uri(), "bytes": sum(files), "files": len(files)}
