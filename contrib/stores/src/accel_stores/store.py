"""The folders of the store."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from fsspec.registry import known_implementations, registry

from accel_core import CheckpointError, Storage
from accel_stores.bucket import Bucket
from accel_stores.files import Files
from accel_stores.hub import Hub, is_repository

__all__ = ["open_storage"]


def open_storage(url: str) -> Storage:
    """Return the folder of a URL: in a file system of fsspec, or a repository of the Hugging Face Hub.

    Raises:
        CheckpointError: the library that serves the URL is not installed.
    """
    scheme = url.partition("://")[0]
    library = known_implementations.get(scheme, {}).get("class", "fsspec").partition(".")[0]
    if scheme not in registry and find_spec(library) is None:
        raise CheckpointError(
            f"{scheme}: URLs need {library}, which is not installed\n"
            f"{known_implementations[scheme].get('err', f'pip install {library}')}",
            path=url,
        )
    return Bucket(_hub() if is_repository(url) else _files(), url)


@cache
def _files() -> Files:
    return Files()


@cache
def _hub() -> Hub:
    return Hub()
