"""Places as users name them: paths, and URLs that plugins serve."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_core.storage.protocols import Storage

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
"""Start of a URL. One slash is enough, since `Path` joins two slashes to one.

A scheme has two letters or more, since a drive of Windows has one letter.
"""
_SECRET: Final = re.compile(r"[^/]*:[^/]*@")
"""User and password, before the first slash."""


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URL, or None for a path."""
    found = _URL.match(text)
    return found[1].lower() if found else None


def path_text(given: object) -> str:
    """Return a path or a URL as text.

    Raises:
        CheckpointError: `given` is neither.
    """
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"{given!r:.80} is not a path\ngive text or a pathlib.Path")
    return text


def local_path(given: object) -> Path:
    """Return the file or folder that a user names; `~` is the home folder.

    Raises:
        CheckpointError: `given` is a URL, or is not a path.
    """
    text = path_text(given)
    if scheme := scheme_of(text):
        raise CheckpointError(
            f"{text} is a URL, and this is read and written as a local file only\n"
            f"give a path on a disk that this machine sees, and copy it to or from {scheme}: yourself",
            path=text,
        )
    return Path(text).expanduser()


def storage_at(given: str | os.PathLike[str], *, each_node: bool = False) -> Storage:
    """Return the folder that a user names by a path or a URL; `~` is the home folder.

    Args:
        given: the path or URL.
        each_node: the path is on a disk of each node's own, not on a shared disk.

    Raises:
        CheckpointError: no plugin serves the URL, the URL holds a password, or `given` is not a path.
    """
    text = path_text(given)
    if (scheme := scheme_of(text)) is None:
        from accel_core.storage.disk import Disk  # late: start-up need not wait for it

        return Disk(Path(os.path.realpath(Path(text).expanduser())), shared=not each_node)
    rest = text.partition(":")[2].lstrip("/")
    if _SECRET.match(rest):
        raise CheckpointError(
            f"a URL of {scheme}: with a password in it would stand in each checkpoint\n"
            "give the URL without it, and the password as the store's library takes it",
            path=f"{scheme}://",
        )
    storage: Storage = store_for(scheme)(f"{scheme}://{rest.rstrip('/')}")
    return storage


def as_user_path(where: Storage) -> Path | str:
    """Return a place in the form for users: a Path, or a URL as text."""
    text = str(where)
    return text if scheme_of(text) else Path(text)


@cache
def store_for(scheme: str) -> Callable[[str], Storage]:
    """Return the function of the installed plugin that serves URLs of this scheme.

    Raises:
        CheckpointError: no installed plugin serves the scheme, or the plugin cannot be used here.
    """
    from accel_core.plugins.catalog import catalog_entry, install_hint
    from accel_core.plugins.discovery import discover

    discovery = discover()
    answers = [each for each in discovery.of("store") if each.card and scheme in each.card.also]
    usable = [each for each in answers if each.status == "available"]
    if not usable:
        entry = catalog_entry(scheme)
        remedy = install_hint(entry.folder) if entry and entry.slot == "store" else "give a folder on a disk"
        why = "; ".join(f"{each.name} is {each.status}: {each.reason}" for each in answers)
        raise CheckpointError(
            f"no plugin here reads and writes {scheme}: URLs{f' ({why})' if why else ''}\n"
            f"{remedy if not answers else f'`accel plugins doctor {answers[0].name}` looks closer'}",
            path=f"{scheme}://",
        )
    return usable[0].implementation
