"""Files in the file systems of fsspec: object stores and others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from glob import has_magic
from io import UnsupportedOperation
from pathlib import Path
from threading import Thread
from typing import Any, Final

from accel_stores.schemes import BUCKETS, CREATES_ONCE

__all__ = ["Files"]

REQUEST_SECONDS: Final = 180.0
"""Seconds after which an operation ends that moves no bytes, the repetitions of its library included."""
SLOWEST: Final = 1 << 18
"""Bytes per second that a store moves at least. An operation that moves some has this much more time."""


class Files:
    """See `Objects`.

    Credentials and endpoints come from each library's own files and variables. The file systems are fsspec's
    cached ones, which any thread may use.
    """

    keeps_history = False

    def entries(self, url: str) -> Mapping[str, int | None]:
        """List one level."""
        with _as_os_errors(url):
            fs, path = _opened(url)
            fs.invalidate_cache()
            try:
                found = _ask(fs, "ls", path, detail=True)
            except FileNotFoundError:
                bucket = path.lstrip("/").partition("/")[0]
                if _scheme(url) in BUCKETS and not _ask(fs, "exists", bucket):
                    raise FileNotFoundError(f"there is no bucket {bucket}") from None
                return {}
            here = path.strip("/")
            sizes = {_name(each, here): _size(fs, each) for each in found}
            sizes.pop("", None)  # a folder's own marker, or a file of the same name
            return sizes

    def content(self, url: str, start: int, size: int) -> bytes:
        """Read a range."""
        with _as_os_errors(url):
            fs, path = _opened(url)
            content: bytes = b""
            if size:
                content = _ask(fs, "cat_file", path, size=size, start=start, end=start + size)
        return content

    def create(self, url: str, content: bytes) -> None:
        """Create by a condition that the store judges."""
        if (scheme := _scheme(url)) not in CREATES_ONCE:
            raise UnsupportedOperation(f"{scheme}: has no way to create a file only once; save to a disk")
        with _as_os_errors(url):
            fs, path = _opened(url)
            _ask(fs, "pipe_file", path, content, mode="create")

    def send(self, source: Path, url: str) -> None:
        """Send in parts at once, where the library does."""
        with _as_os_errors(url):
            fs, target = _opened(url)
            if _scheme(url) == "memory":  # whose put_file makes folders, which stay when they are empty
                fs.pipe_file(target, source.read_bytes())
                return
            if _scheme(url) not in BUCKETS:  # where this could make a bucket
                _ask(fs, "makedirs", target.rpartition("/")[0], exist_ok=True)
            _ask(fs, "put_file", str(source), target, size=source.stat().st_size)

    def remove(self, urls: Sequence[str]) -> None:
        """Remove all at once, or one by one where that does not do.

        That is where one is gone, or has `*`, `?` or `[`: fsspec would take it for a pattern of other files.
        """
        with _as_os_errors(urls[0]):
            paths = [_opened(url)[1] for url in urls]
            fs = _opened(urls[0])[0]
            if not any(map(has_magic, paths)):
                with suppress(FileNotFoundError):
                    _ask(fs, "rm", paths)
                    return
            for path in paths:
                with suppress(FileNotFoundError):
                    _ask(fs, "rm_file", path)

    def pinned(self, url: str) -> str:
        """Return the URL: a bucket has no earlier state to be read."""
        return url


def _opened(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    from fsspec.asyn import get_loop
    from fsspec.core import url_to_fs

    _use_daemon_threads(get_loop())
    fs, path = url_to_fs(url)
    if _scheme(url) == "webhdfs" and not isinstance(fs.session.request, partial):
        fs.session.request = partial(fs.session.request, timeout=REQUEST_SECONDS)
    return fs, path


def _ask(fs: Any, name: str, *arguments: Any, size: int = 0, **options: Any) -> Any:
    """Do an operation of a file system, in bounded time where it is asynchronous. size: bytes that it moves.

    Time-outs of the libraries below are not enough: aiohttp has none while it sends.
    """
    from fsspec.asyn import sync
    from fsspec.exceptions import FSTimeoutError

    if not fs.async_impl:
        return getattr(fs, name)(*arguments, **options)
    seconds = REQUEST_SECONDS + size / SLOWEST
    try:
        return sync(fs.loop, getattr(fs, f"_{name}"), *arguments, timeout=seconds, **options)
    except FSTimeoutError as error:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from error


class _DaemonThreads(ThreadPoolExecutor):
    """A thread per call. Python ends pools of threads before `atexit`, where a run waits for its save."""

    def submit(self, call: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(call(*arguments, **named))
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)

        Thread(target=work, name="store", daemon=True).start()
        return future


@cache
def _use_daemon_threads(loop: Any) -> None:
    """Let the libraries look up hosts by other threads than a pool's. loop: fsspec's, one per process."""
    loop.call_soon_threadsafe(loop.set_default_executor, _DaemonThreads())


def _scheme(url: str) -> str:
    return url.partition(":")[0]


def _name(entry: Mapping[str, Any], folder: str) -> str:
    name = str(entry["name"]).strip("/")
    return "" if name == folder else name.rpartition("/")[2]


def _size(fs: Any, entry: Mapping[str, Any]) -> int | None:
    if entry["type"] == "directory":
        return None
    size = entry["size"]
    return int(_ask(fs, "size", entry["name"]) if size is None else size)  # a web server's listing has none


@contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    """Turn what libraries raise into OSError and its kinds."""
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
