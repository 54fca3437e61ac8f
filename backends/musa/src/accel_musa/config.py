"""Options of section `musa`; not beside the card, because listings of plugins import cards only."""

from __future__ import annotations

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["MusaConfig"]


@frozen(kw_only=True)
class MusaConfig(KwargsHandler):
    """Switches of this process's torch_musa. Section `musa`."""

    allow_tf32: bool | None = option(
        None, help="Let float32 matrix products and convolutions use TF32; torch_musa's default is true."
    )
