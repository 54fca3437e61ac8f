"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from importlib.util import find_spec

from accel_core import Card

__all__ = ["BITSANDBYTES"]


def _probe() -> str | None:
    return None if find_spec("bitsandbytes") else "bitsandbytes is not installed (pip install bitsandbytes)"


BITSANDBYTES = Card(
    name="bitsandbytes",
    slot="extension",
    summary="Checkpoints hold all of a quantised weight, from any loader; no optimizer may train it.",
    api_version="1.0",
    needs={"whole_weights"},
    probe=_probe,
    config="accel_bitsandbytes.options:BitsAndBytesPlugin",
    implementation="accel_bitsandbytes.extension:BitsAndBytes",
)
