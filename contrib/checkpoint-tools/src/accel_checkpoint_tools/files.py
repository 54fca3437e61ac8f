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
from typing import Any, Final

import torch
from safetensors.torch import save
from torch import Tensor

from accel_checkpoint_tools.contents import Source, replaced
from accel_core import CheckpointError

__all__ = ["beside", "mapped", "save_safetensors"]

_ALIGNMENT: Final = 64


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
            opened.write(_bytes_of(source.read()))


@cache
def _name(dtype: torch.dtype) -> str:
    """Return the library's name of a dtype."""
    content = save({"": torch.empty(0, dtype=dtype)})
    name: str = json.loads(content[8:])[""]["dtype"]
    return name


@contextmanager
def mapped(state: Any, folder: Path) -> Iterator[Any]:
    """Give nested dicts, lists and tuples with a tensor for each source in them, none of which takes memory.

    They are mapped from a file in the folder, which is gone when the context ends.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        starts: list[int] = []

        def store(source: Source) -> None:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            starts.append(file.tell())
            file.write(_bytes_of(source.read()))

        replaced(state, store)
        file.write(bytes(_ALIGNMENT))  # nothing cannot be mapped
        file.flush()
        memory, starting = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), iter(starts)

        def in_file(source: Source) -> Tensor:
            start, count = next(starting), math.prod(source.shape) * source.dtype.itemsize
            if not count:
                return torch.empty(source.shape, dtype=source.dtype)
            content = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start)
            return content.view(source.dtype).view(source.shape)

        yield replaced(state, in_file)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


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
