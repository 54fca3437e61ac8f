"""Options of section `mps`. Unset options keep the value of torch or of the user's script."""

from __future__ import annotations

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["MpsConfig"]


@frozen(kw_only=True)
class MpsConfig(KwargsHandler):
    """Options of the Apple GPU. Section `mps`."""

    memory_fraction: float | None = option(
        None, minimum=0, help="Memory limit as a fraction of Metal's recommendation: 0 (no limit) to 2."
    )
    cpu_fallback: bool = option(False, help="Compute operations without a Metal kernel on the CPU.")
