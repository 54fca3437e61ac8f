"""Options of section `npu`. Unset options keep the value of torch_npu or of the user's script."""

from __future__ import annotations

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["NpuConfig"]


@frozen(kw_only=True)
class NpuConfig(KwargsHandler):
    """Switches of this process's torch_npu. Section `npu`."""

    jit_compile: bool | None = option(
        None, help="Compile each operator for its shape (true), or use ready-made binaries (false)."
    )
    allow_hf32: bool | None = option(
        None, help="Let float32 matrix products and convolutions use HF32: faster, fewer mantissa bits."
    )
    cpu_affinity: str | None = option(
        None, help="CPU_AFFINITY_CONF for torch_npu, such as 1 (bind each process near its chip)."
    )
