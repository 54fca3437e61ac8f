"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["DATA"]

DATA = Card(
    name="data-libraries",
    slot="extension",
    summary="Takes streams of data libraries as they share themselves out between processes.",
    api_version="1.0",
    priority=100,
    prepares={"torchdata.nodes.loader:Loader": "dataloader", "webdataset.compat:WebLoader": "dataloader"},
    implementation="accel_data.libraries:Libraries",
)
