"""Device types and Accelerate's word for several processes on them."""

from __future__ import annotations

from ._enums import DistributedType

MULTI = {
    "cpu": DistributedType.MULTI_CPU,
    "cuda": DistributedType.MULTI_GPU,
    "npu": DistributedType.MULTI_NPU,
    "mlu": DistributedType.MULTI_MLU,
    "sdaa": DistributedType.MULTI_SDAA,
    "musa": DistributedType.MULTI_MUSA,
    "xpu": DistributedType.MULTI_XPU,
    "hpu": DistributedType.MULTI_HPU,
    "neuron": DistributedType.MULTI_NEURON,
}
