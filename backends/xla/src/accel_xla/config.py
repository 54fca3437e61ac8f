"""The options of sections `xla` and `xla-spmd`."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["SpmdConfig", "XlaConfig"]


@frozen(kw_only=True)
class XlaConfig(KwargsHandler):
    """Options of the XLA device of this process. Section `xla`."""

    pjrt_device: str | None = option(
        None,
        choices=("TPU", "NEURON", "CPU"),
        help="PJRT_DEVICE; unset: the hardware of this machine. XLA's CPU device is used only if named.",
    )
    prefetch: int = option(
        8, minimum=1, unit="batches", help="Batches that threads upload ahead, for loaders with workers."
    )


@frozen(kw_only=True)
class SpmdConfig(KwargsHandler):
    """Options of distributing a model over the devices of one process. Section `xla-spmd`."""

    wrap: Sequence[str] = option(
        factory=tuple, help="Classes of modules whose outputs are also sharded, such as LlamaDecoderLayer."
    )
    cpu_devices: int | None = option(
        None, minimum=1, help="Number of virtual devices into which XLA's CPU device is split."
    )
