"""Quantised weights in memory-mapped files."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkstemp

import torch
from torch import nn

__all__ = ["map_weight"]


def map_weight(module: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the module's weight to a file in `folder`, and replace it by a memory map of the file.

    The file may be removed while the map is in use.
    """
    weight = module.get_parameter("weight")
    values = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    handle, path = mkstemp(dir=folder)
    os.close(handle)
    Path(path).write_bytes(values.numpy().data)
    mapped = torch.from_file(path, shared=False, size=values.numel(), dtype=torch.uint8)
    weight.data = mapped.view(weight.dtype).view(weight.shape)
