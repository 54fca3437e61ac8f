"""The hooks of a store, by a file system of fsspec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from glob import has_magic
from io import UnsupportedOperation
from pathlib import Path
from typing import Any

from accel_core import hooks, implements
from accel_stores.hub import Hub, is_repository
from accel_stores.schemes import BUCKETS, CREATES_ONCE

__all__ = ["FsspecStore"]


class FsspecStore:
    """Slot store.

    Credentials and endpoints come from each library's own files and variables.
    The file systems are fsspec's cached ones, which any thread may use.
    """

    def __init__(self, config: object, run: object) -> None:
        del config, run  # it has no options, and lives without a run
        self._hub = Hub()

    @implements(hooks.list_stored)
    def list_stored(self, url: str) -> Mapping[str, int | None]:
        """List one level, never from a cache."""
        with _as_os_errors(url):
            if is_repository(url):
                return self._hub.entries(url)
            fs, path = _opened(url)
            fs.invalidate_cache()
            try:
                found = fs.ls(path, detail=True)
            except FileNotFoundError:
                bucket = path.lstrip("/").partition("/")[0]
                if _scheme(url) in BUCKETS and not fs.exists(bucket):
                    raise FileNotFoundError(f"there is no bucket {bucket}") from None
                return {}
            here = path.strip("/")
            sizes = {
                _name(each, here): None if each["type"] == "directory" else each["size"] for each in found
            }
            sizes.pop("", None)  # a folder's own marker, or a file of the same name
            return sizes

    @implements(hooks.read_stored)
    def read_stored(self, url: str, start: int, size: int) -> bytes:
        """Read a range."""
        content: bytes
        with _as_os_errors(url):
            if is_repository(url):
                content = self._hub.content(url, start, size)
            else:
                fs, path = _opened(url)
                content = fs.cat_file(path, start=start, end=start + size)
        if len(content) != size:
            raise OSError(f"{len(content)} of {size} bytes came from {url}")
        return content

    @implements(hooks.create_stored)
    def create_stored(self, url: str, content: bytes) -> None:
        """Create by a condition that the store judges."""
        if (scheme := _scheme(url)) not in CREATES_ONCE and not is_repository(url):
            raise UnsupportedOperation(f"{scheme}: has no way to create a file only once")
        with _as_os_errors(url):
            if is_repository(url):
                self._hub.create(url, content)
                return
            fs, path = _opened(url)
            fs.pipe_file(path, content, mode="create")

    @implements(hooks.send_stored)
    def send_stored(self, path: Path, url: str) -> None:
        """Send in parts at once, where the library does."""
        with _as_os_errors(url):
            if is_repository(url):
                self._hub.send(path, url)
                return
            fs, target = _opened(url)
            if _scheme(url) == "memory":  # whose put_file makes folders, which stay when they are empty
                fs.pipe_file(target, path.read_bytes())
                return
            if _scheme(url) not in BUCKETS:  # where this could make a bucket
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(path), target)

    @implements(hooks.remove_stored)
    def remove_stored(self, urls: Sequence[str]) -> None:
        """Remove all at once, or one by one where that does not do.

        That is where one is gone, or has `*`, `?` or `[`: fsspec would take it for a pattern of other files.
        """
        with _as_os_errors(urls[0]):
            if is_repository(urls[0]):
                self._hub.remove(urls)
                return
            paths = [_opened(url)[1] for url in urls]
            fs = _opened(urls[0])[0]
            if not any(map(has_magic, paths)):
                with suppress(FileNotFoundError):
                    fs.rm(paths)
                    return
            for path in paths:
                with suppress(FileNotFoundError):
                    fs.rm_file(path)


def _opened(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(url)
    return fs, path


def _scheme(url: str) -> str:
    return url.partition(":")[0]


def _name(entry: Mapping[str, Any], folder: str) -> str:
    name = str(entry["name"]).strip("/")
    return "" if name == folder else name.rpartition("/")[2]


@contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    """Turn what libraries raise into OSError and its kinds, as the hooks promise."""
    try:
        yield
    except OSError as error:
        if "PreconditionFailed" in repr(error.__cause__):  # s3fs names it so only for some servers
            raise FileExistsError(f"{url} exists") from error
        raise
    except ImportError as error:
        raise OSError(f"{error}: pip install the library that serves {_scheme(url)}: URLs") from error
    except Exception as error:
        if "Credential" in type(error).__name__ or "Token" in type(error).__name__:
            raise PermissionError(f"{type(error).__name__}: {error}") from error
        raise OSError(f"{type(error).__name__}: {error}") from error
