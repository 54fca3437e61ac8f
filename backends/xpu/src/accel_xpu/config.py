"""Options of sections `xpu` and `ipex`. Unset options keep the library's value."""

from __future__ import annotations

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["IpexConfig", "XpuConfig"]


@frozen(kw_only=True)
class XpuConfig(KwargsHandler):
    """Switches of this process's Intel GPU libraries. Section `xpu`."""

    tf32: bool | None = option(
        None, help="Let float32 matrix products and convolutions use TF32: faster, fewer bits."
    )
    numa_affinity: bool = option(False, help="Pin each process to the CPUs nearest its GPU.")


@frozen(kw_only=True)
class IpexConfig(KwargsHandler):
    """Options of `ipex.optimize` for models that are trained. Section `ipex`."""

    fuse_update_step: bool | None = option(
        None, help="One kernel for the optimizer's step; true: an error if ipex has none for the optimizer."
    )
    optimize_lstm: bool = option(False, help="Replace LSTMs by ipex's own, on CPUs.")
    auto_kernel_selection: bool = option(
        False, help="Choose kernels by shape, for more speed and more memory, on CPUs."
    )
