"""The options of section `mps`.

What is unset stays as torch, or the user, has it.
"""

from __future__ import annotations

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["MpsConfig"]


@frozen(kw_only=True)
class MpsConfig(KwargsHandler):
    """Options of the Apple GPU. Section `mps`."""

    memory_fraction: float | None = option(
        None, minimum=0, help="Limit, as a share of what Metal recommends: 0 (no limit) to 2."
    )
    cpu_fallback: bool = option(False, help="Compute on the CPU what Metal has no kernel for.")
