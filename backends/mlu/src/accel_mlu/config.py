"""Options of section `mlu`; not beside the card, because listings of plugins import cards only."""

from __future__ import annotations

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["MluConfig"]


@frozen(kw_only=True)
class MluConfig(KwargsHandler):
    """Switches of this process's torch_mlu. Section `mlu`."""

    allow_tf32: bool | None = option(
        None, help="Let float32 matrix products and convolutions use TF32: faster, fewer mantissa bits."
    )
