"""One object into one file, which is either the old one or the whole new one; and back, running no code."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from accel_core.errors import CheckpointError

__all__ = ["load", "save"]


def save(obj: Any, path: str | os.PathLike[str] | IO[bytes], *, safe_serialization: bool = False) -> None:
    """Write `obj` beside `path`, then replace `path` by it; or into an open file. Not collective.

    safe_serialization: as safetensors; `obj` then maps names to tensors. Else by `torch.save`.
    """
    if not isinstance(path, str | os.PathLike):
        _write(obj, path, safe_serialization)
        return
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


def _write(obj: Any, file: IO[bytes], safe_serialization: bool) -> None:
    if safe_serialization:
        from safetensors.torch import save as to_bytes

        file.write(to_bytes(obj, metadata={"format": "pt"}))
    else:
        torch.save(obj, file)


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """What `save` wrote, in either form. Tensors, NumPy arrays and plain data only, so it runs no code.

    Args:
        f: a path, or a file opened for reading bytes.
        map_location: where tensors go: a device, or (not for safetensors) all that `torch.load` takes.
        kwargs: for `torch.load`. `weights_only=False` runs what is in the file: for your own files.
    """
    if isinstance(f, str | os.PathLike):
        with Path(f).open("rb") as file:
            return load(file, map_location, **kwargs)
    start = f.read(9)
    f.seek(-len(start), os.SEEK_CUR)
    if start[8:] == b"{":  # safetensors: the length of a JSON header, then the header
        from safetensors.torch import load as from_bytes

        return {name: tensor.to(map_location or "cpu") for name, tensor in from_bytes(f.read()).items()}
    with torch.serialization.safe_globals(_numpys_own()):
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def _numpys_own() -> list[Any]:
    """What arrays and scalars are made of; none of it can do more than hold numbers and strings."""
    made_by = [np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__ if name != "ObjectDType"]
    return [np.ndarray, np.dtype, *made_by, *dtypes]
