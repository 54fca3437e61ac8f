"""One object into one file, which is either the old one or the whole new one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import torch

from accel_core.errors import CheckpointError

__all__ = ["save"]


def save(obj: Any, path: str | os.PathLike[str], *, safe_serialization: bool = False) -> None:
    """Write `obj` beside `path`, then replace `path` by it. Not collective.

    safe_serialization: as safetensors; `obj` then maps names to tensors. Else by `torch.save`.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        if safe_serialization:
            from safetensors.torch import save_file

            try:
                save_file(obj, beside, metadata={"format": "pt"})
            except KeyError as error:
                raise CheckpointError(
                    f"{path}: safetensors has no word for {error}\nsave with safe_serialization=False"
                ) from error
        else:
            torch.save(obj, beside)
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
