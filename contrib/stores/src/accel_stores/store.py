"""The folders of the store."""

from __future__ import annotations

from functools import cache

from accel_core import Storage
from accel_stores.bucket import Bucket
from accel_stores.files import Files
from accel_stores.hub import Hub, is_repository

__all__ = ["open_storage"]


def open_storage(url: str) -> Storage:
    """Return the folder of a URL: in a file system of fsspec, or a repository of the Hugging Face Hub."""
    return Bucket(_hub() if is_repository(url) else _files(), url)


@cache
def _files() -> Files:
    return Files()


@cache
def _hub() -> Hub:
    return Hub()
