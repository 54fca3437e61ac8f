"""The options of section `hpu`. What is unset stays as Gaudi's software, or the user, has it."""

from __future__ import annotations

from attrs import frozen

from accel_core import option

__all__ = ["HpuConfig"]


@frozen(kw_only=True)
class HpuConfig:
    """How this process uses its HPU. Section `hpu`."""

    lazy: bool | None = option(
        None, help="Record operations and compile them in graphs (true), or run each at once (false)."
    )
    graphs: bool = option(
        False, help="Replay a model's recorded forward and backward; wants lazy mode and few batch shapes."
    )
