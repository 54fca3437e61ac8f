"""Paths of single files, as users write them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from accel_core.errors import CheckpointError

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
"""Start of a URL, with one slash, since `Path` makes one of two.

It has two letters or more, since a drive of Windows has one.
"""


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URL, None of a path."""
    found = _URL.match(text)
    return found[1].lower() if found else None


def path_text(given: object) -> str:
    """Return a path or a URL as text.

    Raises:
        CheckpointError: it is neither.
    """
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"{given!r:.80} is not a path\ngive text or a pathlib.Path")
    return text


def local_path(given: object) -> Path:
    """Return the file or folder that a user names; `~` is the home folder.

    Raises:
        CheckpointError: it is a URL, or not a path.
    """
    text = path_text(given)
    if scheme := scheme_of(text):
        raise CheckpointError(
            f"{text} is a URL, and this is read and written as a local file only\n"
            f"give a path on a disk that this machine sees, and copy it to or from {scheme}: yourself",
            path=text,
        )
    return Path(text).expanduser()
