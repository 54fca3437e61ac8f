"""Save one object into one file, atomically, and load it without running code."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from accel_core.checkpoint.places import local_path
from accel_core.errors import CheckpointError


class UnwritableError(CheckpointError, RuntimeError):
    """A file or folder that cannot be written. A RuntimeError too, as `torch.save` raises."""


def save(obj: Any, path: str | os.PathLike[str] | IO[bytes], *, safe_serialization: bool = False) -> None:
    """Write `obj` to a temporary file beside `path`, then replace `path` by it. Not collective.

    Args:
        obj: the object; with `safe_serialization` a mapping of names to tensors.
        path: a local path, or a file opened for writing bytes, which is written directly.
        safe_serialization: write safetensors, instead of by `torch.save`.

    Raises:
        CheckpointError: `path` is a URL, or safetensors cannot hold `obj`.
        UnwritableError: the disk cannot be written.
    """
    if not isinstance(path, str | os.PathLike) and hasattr(path, "write"):
        _write(obj, path, safe_serialization)
        return
    target = local_path(path)
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        write_whole(obj, beside, safe_serialization=safe_serialization)
        beside.replace(target)
    except OSError as error:
        raise not_written(target, error) from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def not_written(path: object, error: Exception) -> CheckpointError:
    """Return the error for a file or folder that cannot be written."""
    reason = getattr(error, "strerror", None) or error  # not the whole text: it names a temporary file
    return UnwritableError(
        f"{path} could not be written: {type(error).__name__}: {reason}\n"
        "what was there before is unchanged; free some space, or write to another folder",
        path=str(path),
    )


def write_whole(obj: Any, path: Path, *, safe_serialization: bool) -> None:
    """Write and sync a new file. Raises OSError, or CheckpointError if safetensors cannot hold `obj`."""
    path.touch()
    mode = path.stat().st_mode  # by the user's umask; safetensors makes private files
    if safe_serialization:
        _as_safetensors(obj, path)
    else:
        with path.open("wb") as file:  # opened here: torch says of a full disk that a position is unexpected
            torch.save(obj, file)
    path.chmod(mode)
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _as_safetensors(obj: Any, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with _refused_objects():
            save_file(obj, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


@contextmanager
def _refused_objects() -> Iterator[None]:
    """Raise CheckpointError if safetensors refuses an object, by any error."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        text = f"safetensors cannot hold this object: {error}\nsave with safe_serialization=False"
        raise CheckpointError(text) from error


def _write(obj: Any, file: IO[bytes], safe_serialization: bool) -> None:
    if safe_serialization:
        from safetensors.torch import save as to_bytes

        with _refused_objects():
            data = to_bytes(obj, metadata={"format": "pt"})
        file.write(data)
    else:
        torch.save(obj, file)


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Load an object that `save` wrote, in either format.

    By default loads tensors, arrays and plain data only, and runs no code of the file.

    Args:
        f: a path, or a file opened for reading bytes.
        map_location: the device of the tensors, or (not for safetensors) any `map_location` of `torch.load`.
        kwargs: for `torch.load`. `weights_only=False` runs code of the file: for your own files only.
    """
    if isinstance(f, str | os.PathLike) or not hasattr(f, "read"):
        with local_path(f).open("rb") as file:
            return load(file, map_location, **kwargs)
    start = f.read(9)
    f.seek(-len(start), os.SEEK_CUR)
    if start[8:] == b"{":  # safetensors: the length of a JSON header, then the header
        from safetensors.torch import load as from_bytes

        return {name: tensor.to(map_location or "cpu") for name, tensor in from_bytes(f.read()).items()}
    with torch.serialization.safe_globals(_numpys_own()):
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def _numpys_own() -> list[Any]:
    """Return NumPy's classes for arrays and scalars, which only hold numbers and strings."""
    made_by = [np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__ if name != "ObjectDType"]
    return [np.ndarray, np.dtype, *made_by, *dtypes]
