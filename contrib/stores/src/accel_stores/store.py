"""The hook of a store."""

from __future__ import annotations

from accel_core import Storage, hooks, implements
from accel_stores.bucket import Bucket
from accel_stores.files import Files
from accel_stores.hub import Hub, is_repository

__all__ = ["FsspecStore"]


class FsspecStore:
    """Slot store: folders in file systems of fsspec, and in repositories of the Hugging Face Hub."""

    def __init__(self, config: object, run: object) -> None:
        del config, run  # it has no options, and lives without a run
        self._files, self._hub = Files(), Hub()

    @implements(hooks.open_storage)
    def open_storage(self, url: str) -> Storage:
        """Return the folder of a URL."""
        return Bucket(self._hub if is_repository(url) else self._files, url)
