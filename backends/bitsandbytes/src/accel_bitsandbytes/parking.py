"""Weights on their way to disk: written as they are made, and mapped."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkstemp

import torch
from torch import nn

__all__ = ["park"]


def park(module: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the module's weight to a file in `folder`, and map it from there.

    The file may be removed while the view is in use.
    """
    weight = module.get_parameter("weight")
    values = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    handle, path = mkstemp(dir=folder)
    os.close(handle)
    Path(path).write_bytes(values.numpy().data)
    mapped = torch.from_file(path, shared=False, size=values.numel(), dtype=torch.uint8)
    weight.data = mapped.view(weight.dtype).view(weight.shape)
