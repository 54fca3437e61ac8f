"""Operations on nested structures, in one process and between processes.

Public by `from accel_core import ops`. Each module lists its public names.
"""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Any

from accel_core.checkpoint.file import load
from accel_core.checkpoint.file import save as _write
from accel_core.contract.run import current
from accel_core.distributed import collectives, nested
from accel_core.distributed.collectives import *  # noqa: F403
from accel_core.distributed.nested import *  # noqa: F403

if TYPE_CHECKING:
    from accel_core.contract.run import Run

__all__ = ["load", "save"]
__all__ += collectives.__all__
__all__ += nested.__all__


def save(
    obj: Any,
    f: str | os.PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
    *,
    run: Run | None = None,
) -> None:
    """Write `obj` on the main process, or on the main process of each node. Not collective.

    An existing file is replaced when the new one is complete. With `safe_serialization` the file is
    safetensors, and `obj` maps names to tensors.
    """
    if (run or current()).world.first_of_disk(each_node=save_on_each_node):
        _write(obj, f, safe_serialization=safe_serialization)
