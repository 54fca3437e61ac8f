"""The object that selects the extension in Python."""

from __future__ import annotations

from attrs import frozen

from accel_core import KwargsHandler

__all__ = ["BitsAndBytesPlugin"]


@frozen(kw_only=True)
class BitsAndBytesPlugin(KwargsHandler):
    """Select extension `bitsandbytes`, which has no options."""
