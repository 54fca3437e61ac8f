"""Options of section `cuda`. Unset options keep the value of torch or of the user's script."""

from __future__ import annotations

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["CudaConfig"]


@frozen(kw_only=True)
class CudaConfig(KwargsHandler):
    """Switches of this process's CUDA libraries, and its CPU affinity. Section `cuda`."""

    tf32: bool | None = option(
        None, help="Let float32 matrix products and convolutions use TF32: faster, 10 bits of mantissa."
    )
    cudnn_benchmark: bool | None = option(
        None, help="Let cuDNN time its algorithms for each new shape and keep the fastest."
    )
    deterministic: bool | None = option(
        None, help="Restrict cuDNN and cuBLAS to algorithms that give the same result each time."
    )
    reduced_precision_reduction: bool | None = option(
        None, help="Accumulate products of 16-bit matrices in 16 bits: faster, less exact."
    )
    expandable_segments: bool | None = option(
        None, help="Let the allocator grow its segments: less fragmentation if tensor sizes vary."
    )
    numa_affinity: bool = option(False, help="Pin each process to the CPUs nearest its GPU.")
