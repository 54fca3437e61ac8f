"""Tensor, context and sequence parallelism, as Accelerate describes them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from accel_compat.translating import Translated


@dataclass
class TorchTensorParallelPlugin(Translated):
    """Degree of tensor parallelism."""

    ours: ClassVar[str] = "accel_fsdp:TorchTensorParallelPlugin"

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class TorchTensorParallelConfig:
    """More about tensor parallelism."""

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig:
    """How context-parallel ranks get each other's keys and values."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = os.environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather")
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(
                f"Invalid cp_comm_strategy: {self.cp_comm_strategy}. Supported strategies are 'allgather' or"
                " 'alltoall'."
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """How DeepSpeed's Ulysses splits sequences."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        read, start = os.environ.get, "PARALLELISM_CONFIG_SP_"
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = read(f"{start}SEQ_LENGTH_IS_VARIABLE", "true").lower() == "true"
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            if f"{start}SEQ_LENGTH" not in os.environ:
                raise ValueError(
                    "when `sp_seq_length_is_variable` is `False` `sp_seq_length` must be provided either"
                    f" through the constructor or the environment variable {start}SEQ_LENGTH"
                )
            given = os.environ[f"{start}SEQ_LENGTH"]
            self.sp_seq_length = None if given == "None" else int(given)
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = read(f"{start}ATTN_IMPLEMENTATION")
        known = (None, "flash_attention_2", "flash_attention_3", "sdpa")
        if self.sp_attn_implementation not in known and "/" not in str(self.sp_attn_implementation):
            raise ValueError(
                f"Invalid sp_attn_implementation: {self.sp_attn_implementation}. Supported are 'sdpa',"
                " 'flash_attention_2', 'flash_attention_3' and kernels of the hub"
            )
