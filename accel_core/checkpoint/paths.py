"""Paths as users write them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from accel_core.errors import CheckpointError

__all__ = ["local_path"]

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""Start of a URL, with one slash, since `Path` makes one of two.

It has two letters or more, since a drive of Windows has one.
"""


def local_path(given: str | os.PathLike[str]) -> Path:
    """Return the file or folder that a user names; `~` is the home folder.

    Raises:
        CheckpointError: it is a URL.
    """
    text = os.fspath(given)
    if found := _URL.match(text):
        raise CheckpointError(
            f"{text} is a URL, and checkpoints and weights are read and written as local files only\n"
            f"give a folder on a disk that this machine sees, and copy it to or from {found[1]}: yourself",
            path=text,
        )
    return Path(text).expanduser()
