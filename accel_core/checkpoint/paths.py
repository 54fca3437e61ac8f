"""Paths of single files, as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from accel_core.checkpoint.stored import scheme_of
from accel_core.errors import CheckpointError

__all__ = ["local_path"]


def local_path(given: str | os.PathLike[str]) -> Path:
    """Return the file or folder that a user names; `~` is the home folder.

    Raises:
        CheckpointError: it is a URL.
    """
    text = os.fspath(given)
    if scheme := scheme_of(text):
        raise CheckpointError(
            f"{text} is a URL, and this is read and written as a local file only\n"
            f"give a path on a disk that this machine sees, and copy it to or from {scheme}: yourself",
            path=text,
        )
    return Path(text).expanduser()
