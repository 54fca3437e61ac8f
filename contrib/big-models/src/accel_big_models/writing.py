"""Weights that go to disk, in files of their own that end with the model."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from accel_big_models.composing import leaves_of, sourced
from accel_big_models.files import InFile, OpenFile
from accel_big_models.sizes import text_of
from accel_big_models.sources import Source
from accel_core import AccelError

__all__ = ["write_blocks"]

ALIGNED = 64


def write_blocks(
    tensors: Sequence[Tensor], folder: str | os.PathLike[str] | None, *, mapped: bool
) -> list[Source]:
    """Write tensors to a new file, and return where each lies.

    The file is in a folder of its own, whose name nobody has had, and is removed with the last tensor's
    source: no model can find another's weights there.

    Raises:
        AccelError: the disk is full, or the folder cannot be written to; nothing is left there.
    """
    if not tensors:
        return []
    leaves = [leaf for tensor in tensors for leaf in leaves_of(tensor.detach())]
    size = sum(leaf.nbytes + ALIGNED for leaf in leaves)
    try:
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        own = tempfile.mkdtemp(prefix="accel-big-models-", dir=folder)
    except OSError as error:
        raise AccelError(
            f"{folder or tempfile.gettempdir()}: no folder can be made there for weights: {error.strerror}\n"
            "give a folder that this process may write to: folder=..."
        ) from error
    try:
        parts = iter(_write(Path(own), leaves, size, mapped=mapped))
        return [sourced(tensor, parts) for tensor in tensors]
    except OSError as error:
        free = shutil.disk_usage(own).free
        shutil.rmtree(own, ignore_errors=True)
        raise AccelError(
            f"{text_of(size)} of weights cannot be written to {own}, which has {text_of(free)} free:"
            f" {error.strerror}\ngive a folder on another disk: folder=..."
        ) from error
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise


def _write(own: Path, tensors: Sequence[Tensor], size: int, *, mapped: bool) -> list[InFile]:
    path, starts = own / "weights", []
    with path.open("xb") as out:
        os.posix_fallocate(out.fileno(), 0, size)  # a disk that is too small says so at once
        for tensor in tensors:
            out.seek(-(-out.tell() // ALIGNED) * ALIGNED)
            starts.append(out.tell())
            out.write(_bytes(tensor))
        out.truncate()
    file = OpenFile(path, mapped=mapped)
    weakref.finalize(file, shutil.rmtree, own, ignore_errors=True)
    return [
        InFile(file, start, tuple(tensor.shape), tensor.dtype)
        for tensor, start in zip(tensors, starts, strict=True)
    ]


def _bytes(tensor: Tensor) -> memoryview:
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data: memoryview = values.view(torch.uint8).numpy().data
    return data
