"""One object into one file, which is either the old one or the whole new one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import torch

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

            save_file(obj, beside, metadata={"format": "pt"})
        else:
            torch.save(obj, beside)
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
