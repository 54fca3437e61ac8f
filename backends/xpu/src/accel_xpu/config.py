"""The options of section `xpu`. What is unset stays as torch, or the user, has it."""

from __future__ import annotations

from attrs import frozen

from accel_core import option

__all__ = ["XpuConfig"]


@frozen(kw_only=True)
class XpuConfig:
    """Switches of this process's Intel GPU libraries. Section `xpu`."""

    tf32: bool | None = option(None, help="Let float32 matrix products use TF32: faster, fewer bits.")
