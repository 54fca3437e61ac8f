"""Foreign pickles, read as data: what would run code is refused, by name."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from accel_core import CheckpointError

__all__ = ["Fields", "read_metadata", "read_torch"]

_NUMPY: Final = np.zeros(1).__reduce__()[0]
"""Constructor of arrays in a pickle; its module depends on numpy's version."""
SAFE: Final[list[Any]] = [_NUMPY, np.ndarray, np.dtype, type(np.dtype("uint32"))]
"""Names beyond torch's own: arrays of numbers, for numpy's generator."""


def read_torch(file: Path | io.BytesIO, name: str) -> Any:
    """Read what `torch.save` wrote, with tensors on the CPU.

    Tensors of a file are mapped: they take no memory until they are read.

    Raises:
        CheckpointError: it holds more than tensors and plain data, or is damaged.
    """
    try:
        is_mapped = isinstance(file, Path) and zipfile.is_zipfile(file)
        with torch.serialization.safe_globals(SAFE):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # torch says in many ways that it does not know what it reads
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{name} cannot be read as plain data: {reason}\n"
            "it is damaged, or holds objects whose code would have to run, which is not done here",
            path=name,
        ) from error


class Fields:
    """Stands for any dataclass of torch's metadata.

    Its fields as attributes, nothing of its code.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.arguments = state


def _shape(numbers: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(numbers)


_METADATA: Final = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties"
    " MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
)
_KNOWN: Final[dict[tuple[str, str], Any]] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): type(name, (Fields,), {})
        for name in _METADATA.split()
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (Fields,), {}),
    ("torch", "Size"): _shape,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): lambda *parts: "/".join(parts)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}
"""Names that a `.metadata` may hold; they become tuples, texts and `Fields`."""


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = getattr(torch, name)
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no such file needs")
        return known


def read_metadata(path: Path) -> Any:
    """Return the `.metadata` of a torch.distributed.checkpoint folder.

    None of torch's code is called for it.

    Raises:
        CheckpointError: it names anything but the few classes that such a file needs, or is damaged.
    """
    try:
        with path.open("rb") as file:
            return _Restricted(file).load()
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} was not written by torch.distributed.checkpoint: {error}\n"
            "give the folder that has a file .metadata",
            path=str(path),
        ) from error
    except Exception as error:  # a damaged pickle makes the machine that runs it fail in any way
        raise CheckpointError(
            f"{path} cannot be read as plain data: {type(error).__name__}: {error}\n"
            "it is damaged, or not what torch wrote; nothing in it was run",
            path=str(path),
        ) from error
