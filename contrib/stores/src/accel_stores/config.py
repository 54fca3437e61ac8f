"""The options of section `mirror`."""

from __future__ import annotations

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["MirrorConfig"]


@frozen(kw_only=True)
class MirrorConfig(KwargsHandler):
    """Options of the copies of numbered checkpoints. Section `mirror`."""

    url: str | None = option(None, help="Place of the copies, such as s3://bucket/run.")
    every: int = option(1, minimum=1, help="Copy every Nth checkpoint.")
    keep: int | None = option(
        None, minimum=1, help="How many copies are kept; unset: as many as project.total_limit."
    )
