"""Options of section `ddp`: arguments of DistributedDataParallel and the compression of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["DDPCommunicationHookType", "DistributedDataParallelKwargs"]


class DDPCommunicationHookType(str, Enum):
    """Compression of gradients for the reduction between ranks."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_Hook = DDPCommunicationHookType
POWER_SGD: Final = frozenset({_Hook.POWER_SGD, _Hook.BATCHED_POWER_SGD})
POWER_SGD_OPTIONS: Final = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "random_seed",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)
"""Arguments of torch's PowerSGDState except `process_group`."""


@frozen(kw_only=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of `torch.nn.parallel.DistributedDataParallel`. Section `ddp`."""

    dim: int = option(0, help="Dimension along which torch would scatter inputs over several devices.")
    broadcast_buffers: bool = option(True, help="Copy rank 0's buffers to all ranks before each forward.")
    bucket_cap_mb: int = option(
        25, minimum=1, unit="MiB", help="Gradients are reduced in buckets of this size, during backward."
    )
    find_unused_parameters: bool = option(
        False, help="Find the parameters that a forward did not use; walks the autograd graph in each step."
    )
    check_reduction: bool = option(False, help="Deprecated by torch, which always checks.")
    gradient_as_bucket_view: bool = option(
        False, help="Make gradients views of the buckets, which saves a copy of them."
    )
    static_graph: bool = option(False, help="Promise that each step uses the same parameters.")
    comm_hook: DDPCommunicationHookType = option(
        _Hook.NO, converter=_Hook, help="Compression of gradients for the reduction between ranks."
    )
    comm_wrapper: DDPCommunicationHookType = option(
        _Hook.NO,
        converter=_Hook,
        choices=(_Hook.NO, _Hook.FP16, _Hook.BF16),
        help="Dtype to which gradients are cast before comm_hook compresses them.",
    )
    comm_state_option: Mapping[str, Any] = option(
        factory=dict,
        help="Arguments of torch's PowerSGDState, for comm_hook power_sgd and batched_power_sgd.",
    )

    def __attrs_post_init__(self) -> None:
        """Refuse options that torch would silently ignore."""
        if self.comm_wrapper is not _Hook.NO and self.comm_hook is _Hook.NO:
            raise ValueError(
                f"comm_wrapper is {self.comm_wrapper.value!r}, but there is no comm_hook to wrap;"
                f" set comm_hook: {self.comm_wrapper.value} instead"
            )
        if self.comm_state_option and self.comm_hook not in POWER_SGD:
            raise ValueError(
                f"comm_state_option is for comm_hook power_sgd and batched_power_sgd,"
                f" not {self.comm_hook.value!r}"
            )
        unknown = sorted(set(self.comm_state_option) - set(POWER_SGD_OPTIONS))
        if unknown:
            raise ValueError(
                f"comm_state_option has no {', '.join(unknown)}; it has {', '.join(POWER_SGD_OPTIONS)}"
            )
