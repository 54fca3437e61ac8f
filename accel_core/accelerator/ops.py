"""Operations on nested structures, within a process and between processes: `accel_core.ops`."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Any

from accel_core.checkpoint.file import load
from accel_core.checkpoint.file import save as _write
from accel_core.contract.run import current
from accel_core.distributed.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_for_metrics,
    gather_object,
    pad_across_processes,
    reduce,
    split_between_processes,
    wait_for_everyone,
)
from accel_core.distributed.nested import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    recursively_apply,
    send_to_device,
    slice_tensors,
)

if TYPE_CHECKING:
    from accel_core.contract.run import Run

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "load",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "save",
    "send_to_device",
    "slice_tensors",
    "split_between_processes",
    "wait_for_everyone",
]


def save(
    obj: Any,
    f: str | os.PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
    *,
    run: Run | None = None,
) -> None:
    """Write `obj` on the main process (or that of each node); a file is replaced only when complete.

    Not collective. safe_serialization: as safetensors; `obj` then maps names to tensors.
    """
    if (run or current()).world.first_of_disk(each_node=save_on_each_node):
        _write(obj, f, safe_serialization=safe_serialization)
