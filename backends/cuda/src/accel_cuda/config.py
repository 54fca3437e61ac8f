"""The options of section `cuda`.

What is unset stays as torch, or the user, has it.
"""

from __future__ import annotations

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["CudaConfig"]


@frozen(kw_only=True)
class CudaConfig(KwargsHandler):
    """Switches of this process's CUDA libraries, and where the process runs.

    Section `cuda`.
    """

    tf32: bool | None = option(
        None, help="Let float32 matrix products and convolutions use TF32: faster, 10 bits of mantissa."
    )
    cudnn_benchmark: bool | None = option(
        None, help="Let cuDNN time its algorithms for each new shape and keep the fastest."
    )
    deterministic: bool | None = option(
        None, help="Let cuDNN and cuBLAS use algorithms that give the same result each time only."
    )
    reduced_precision_reduction: bool | None = option(
        None, help="Let products of 16-bit matrices add up in 16 bits: faster, less exact."
    )
    expandable_segments: bool | None = option(
        None, help="Let the allocator grow its segments: less memory is lost where sizes vary."
    )
    numa_affinity: bool = option(False, help="Pin each process to the CPUs nearest its GPU.")
