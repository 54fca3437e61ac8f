"""Places of checkpoints in stores, which plugins serve by the scheme of a URL.

A `StoredPath` does what reading a checkpoint needs of a `Path`. Local folders never come here.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attrs import evolve, field, frozen

from accel_core.checkpoint.bound import BoundStore, NoAnswerError
from accel_core.checkpoint.paths import path_text, scheme_of
from accel_core.errors import CheckpointError, PluginError

if TYPE_CHECKING:
    from accel_core.plugins.binding import Hooks

logger = logging.getLogger(__name__)

_SECRET: Final = re.compile(r"[^/]*:[^/]*@")
"""User and password, before the first slash."""


class UnreadableError(CheckpointError):
    """The checkpoint cannot be read now, and may be whole.

    No older one is taken instead.
    """


@frozen
class StoredPath:
    """A file or folder in a store; a folder is there while something is in it.

    store: the hooks of the plugin that serves its scheme. listing: of a folder, its entries, where they were
    asked for. size: of a file, in bytes, where the listing of its folder has it.
    """

    url: str
    store: Any = field(eq=False, repr=False)
    listing: Mapping[str, int | None] | None = field(default=None, eq=False, repr=False)
    size: int | None = field(default=None, eq=False, repr=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StoredPath:
        size = None if self.listing is None else self.listing.get(name)
        return evolve(self, url=f"{self.url}/{name}", listing=None, size=size)

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> StoredPath:
        """The folder that it is in."""
        return evolve(self, url=self.url.rpartition("/")[0], listing=None, size=None)

    def with_suffix(self, suffix: str) -> StoredPath:
        """Return the file beside it whose name ends otherwise."""
        return self.parent / f"{self.name.rpartition('.')[0]}{suffix}"

    def listed(self) -> StoredPath:
        """Return this folder with its listing.

        Raises:
            UnreadableError: the store does not answer, or not to this process.
        """
        try:
            return evolve(self, listing=self.store.list_stored(self.url))
        except OSError as error:  # of a bucket that is not there, too
            raise self.cannot_be_reached(error) from error

    @property
    def entries(self) -> Mapping[str, int | None]:
        """Name -> bytes of each entry, None of a folder.

        Asked for now, unless this one is listed.
        """
        return self.listing if self.listing is not None else self.listed().listing or {}

    def exists(self) -> bool:
        """Return True if it is a file, or something is in it."""
        return self.size is not None or bool(self.entries)

    is_dir = exists

    def iterdir(self) -> Iterator[StoredPath]:
        """Yield the entries."""
        here = self.listed()
        return (here / name for name in sorted(here.entries))

    def read(self, start: int, size: int) -> bytes:
        """Return bytes of a file.

        Raises:
            FileNotFoundError: there is no such file.
            UnreadableError: the store does not answer, or not to this process.
        """
        try:
            content: bytes = self.store.read_stored(self.url, start, size)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self.cannot_be_reached(error) from error
        return content

    def content(self) -> bytes:
        """Return all of a small file of a listed folder, as `read` does."""
        return self.read(0, self.size or 0)

    def create(self, content: bytes) -> None:
        """Write this small new file, as `create_stored` does; tried twice."""
        self._twice(lambda: self.store.create_stored(self.url, content))

    def send(self, source: Path) -> None:
        """Write this file from a local one; tried twice. Raises OSError."""
        self._twice(lambda: self.store.send_stored(source, self.url))

    def _twice(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (FileExistsError, NoAnswerError):
            raise
        except OSError as error:
            logger.warning("%s is sent once more, since %s: %s", self, type(error).__name__, error)
            write()

    def remove(self, names: Sequence[str]) -> None:
        """Remove these files of the folder. Raises OSError."""
        if names:
            self.store.remove_stored([f"{self.url}/{name}" for name in names])

    def cannot_be_reached(self, error: OSError) -> UnreadableError:
        """Return the error for a store that does not answer."""
        is_silent = isinstance(error, NoAnswerError)
        remedy = "look after the store" if is_silent else "check the name, and that this process may use it"
        return UnreadableError(
            f"{self.url} cannot be reached: {type(error).__name__}: {error}\n"
            f"{remedy}; nothing was changed, and no older checkpoint is taken instead",
            path=self.url,
        )


Place: TypeAlias = Path | StoredPath


def place(given: str | os.PathLike[str] | StoredPath) -> Place:
    """Return the file or folder that a user names, by a path or a URL.

    `~` is the home folder.

    Raises:
        CheckpointError: no plugin serves the URL, or it holds a password; or this is not a path.
    """
    if isinstance(given, StoredPath):
        return given
    text = path_text(given)
    if (scheme := scheme_of(text)) is None:
        return Path(text).expanduser()
    rest = text.partition(":")[2].lstrip("/")
    if _SECRET.match(rest):
        raise CheckpointError(
            f"a URL of {scheme}: with a password in it would stand in each checkpoint\n"
            "give the URL without it, and the password as the store's library takes it",
            path=f"{scheme}://",
        )
    return StoredPath(f"{scheme}://{rest.rstrip('/')}", BoundStore(store_for(scheme)))


def told(where: Place) -> Path | str:
    """Return a place as users get it: a path, or a URL as text."""
    return where if isinstance(where, Path) else where.url


@cache
def store_for(scheme: str) -> Hooks:
    """Return the hooks of the installed plugin that serves these URLs.

    Raises:
        CheckpointError: there is none, it cannot be used here, or two do.
    """
    from accel_core.plugins.binding import Binder
    from accel_core.plugins.catalog import catalog_entry, install_hint
    from accel_core.plugins.discovery import discover, implementation

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
    if len(usable) > 1:
        raise PluginError(
            f"{scheme}: URLs are served by {' and '.join(each.origin for each in usable[:2])}\n"
            "uninstall one of them, or name it in ACCEL_PLUGINS_BLOCK",
            plugin=usable[0].name,
        )
    record, binder = usable[0], Binder()
    plugin = implementation(record)(None, None)
    return binder.hooks([binder.register(plugin, name=record.name, slot="store", origin=record.origin)])
