"""Files of tensors that are read one by one while they are written."""

from __future__ import annotations

import json
import math
import mmap
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from torch.serialization import set_default_mmap_options, skip_data

from accel_checkpoint_tools.contents import Source, mapped
from accel_core import CheckpointError

__all__ = ["beside", "save_safetensors", "save_torch"]


def save_safetensors(tensors: Mapping[str, Source], file: Path) -> None:
    """Write a safetensors file as `safetensors.torch.save_file` does, with memory for one tensor."""
    # The widest first, so each is aligned to its own item size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, source in ordered:
        start, end = end, end + math.prod(source.shape) * source.dtype.itemsize
        header[name] = {"dtype": _name(source.dtype), "shape": source.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for _, source in ordered:
            opened.write(source.read().contiguous().reshape(-1).view(torch.uint8).numpy().data)


@cache
def _name(dtype: torch.dtype) -> str:
    """Return the library's name of a dtype."""
    content = save({"": torch.empty(0, dtype=dtype)})
    name: str = json.loads(content[8:])[""]["dtype"]
    return name


def save_torch(state: Any, file: Path) -> None:
    """Write what `torch.save` writes, with memory for one tensor: sources stand in place of tensors.

    The file is laid out first, and its tensors are filled where they lie in it.
    """
    tensors: list[Source | Tensor] = []

    def placeholder(each: Source | Tensor) -> Tensor:
        tensors.append(each)
        return each if isinstance(each, Tensor) else each.empty()

    with skip_data():
        torch.save(mapped(state, placeholder), file)
    with set_default_mmap_options(mmap.MAP_SHARED):
        laid_out = torch.load(file, mmap=True, weights_only=False)  # this process has written it
    targets: list[Source | Tensor] = []
    mapped(laid_out, targets.append)
    for each, target in zip(tensors, targets, strict=True):
        if isinstance(target, Tensor):
            target.copy_(each if isinstance(each, Tensor) else each.read())


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Give a folder to write into; once complete it takes the target's name."""
    if target.exists():
        raise CheckpointError(
            f"{target} exists\nexport to another folder, or move this one away", path=str(target)
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{target.name}."
        with tempfile.TemporaryDirectory(prefix=prefix, suffix=".partial", dir=target.parent) as made:
            folder = Path(made) / target.name
            folder.mkdir()
            yield folder
            folder.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error}\nexport to another folder, or free some space",
            path=str(target),
        ) from error
