"""The cards: accel-core reads them before it imports anything else of this package."""

from __future__ import annotations

from importlib.util import find_spec

from accel_core import Card
from accel_stores.schemes import CREATES_ONCE, READ

__all__ = ["FSSPEC", "MIRROR"]


def _probe() -> str | None:
    """Fsspec is installed; each store's own library is asked for when it is used."""
    return None if find_spec("fsspec") else "the library fsspec is not installed; pip install fsspec"


FSSPEC = Card(
    name="fsspec",
    slot="store",
    summary="Checkpoints in object stores and other file systems of fsspec.",
    api_version="1.0",
    priority=100,
    also=(*CREATES_ONCE, *READ),
    probe=_probe,
    implementation="accel_stores.store:open_storage",
)

MIRROR = Card(
    name="mirror",
    slot="extension",
    summary="Copies numbered checkpoints to a store in the background.",
    api_version="1.0",
    config="accel_stores.config:MirrorConfig",
    implementation="accel_stores.mirror:Mirror",
)
