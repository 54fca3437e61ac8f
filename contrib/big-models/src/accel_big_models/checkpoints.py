"""Checkpoints of several formats as one table: name -> values in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from attrs import evolve
from torch import Tensor

from accel_big_models.files import InFile, OpenFile
from accel_big_models.sources import InCheckpoint, InMemory, Source
from accel_core import CheckpointError, stored_weights

__all__ = ["open_checkpoint", "with_dtype"]

# Both forms of the names stand in files: those of safetensors, and numpy's, which Accelerate writes.
DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_USUAL: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Names of weights in a folder, as libraries write them."""
_HEADER: Final = 100_000_000
"""Bytes that the header of a safetensors file may have."""


def open_checkpoint(checkpoint: str | os.PathLike[str], *, mapped: bool = True) -> dict[str, Source]:
    """Open a checkpoint: compare sizes with headers, and read no weight.

    Args:
        checkpoint: see `load`.
        mapped: see `load`.

    Raises:
        CheckpointError: there is no checkpoint, or a file is damaged or missing; names the file.
    """
    path = Path(checkpoint)
    if not path.is_dir():
        return _file(path, mapped=mapped)
    if (path / "index.json").exists():
        return _offload_folder(path, mapped=mapped)
    for name in _USUAL:
        if (path / name).exists():
            return _file(path / name, mapped=mapped)
    indexes = [*path.glob("*.safetensors.index.json"), *path.glob("*.bin.index.json")]
    found = indexes or [*path.glob("*.safetensors")]
    if len(found) == 1 and not found[0].name.startswith("rank-"):
        return _file(found[0], mapped=mapped)
    return _own(path, mapped=mapped)


def with_dtype(source: Source, dtype: torch.dtype) -> Source:
    """Return the source of the same weight, computed in another dtype."""
    if source.dtype == dtype:
        return source
    changed: Source = evolve(cast("Any", source), dtype=dtype)
    return changed


def _file(path: Path, *, mapped: bool) -> dict[str, Source]:
    if path.name.endswith(".json"):
        return _sharded(path, mapped=mapped)
    if path.suffix == ".safetensors":
        return _safetensors(OpenFile(path, mapped=mapped))
    return _torch_file(path, mapped=mapped)


def _safetensors(file: OpenFile) -> dict[str, Source]:
    """Read the header: 8 bytes of its length, JSON, then the weights without gaps."""
    head = bytearray(8)
    file.read(0, memoryview(head))
    length = int.from_bytes(head, "little")
    if not 2 <= length <= min(_HEADER, file.size - 8):
        raise file._damaged(f"its header would have {length} bytes: it is cut, or is not a safetensors file")
    text = bytearray(length)
    file.read(8, memoryview(text))
    sources: dict[str, Source] = {}
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            weight = InFile(file, 8 + length + first, tuple(entry["shape"]), DTYPES[entry["dtype"]])
            if weight.size != last - first or first < 0:
                raise ValueError(f"{name} has {last - first} bytes for {weight.size}")
            sources[name] = weight
            if weight.start + weight.size > file.size:
                raise file._damaged(
                    f"it has {file.size} bytes, and {name} ends at {weight.start + weight.size}: it was cut"
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise file._damaged(f"its header is damaged: {error!r}") from error
    return sources


def _sharded(index: Path, *, mapped: bool) -> dict[str, Source]:
    homes = _read_json(index, "weight_map")
    shards = {name: _file(index.parent / name, mapped=mapped) for name in dict.fromkeys(homes.values())}
    if lost := [(name, file) for name, file in homes.items() if name not in shards[file]]:
        name, file = lost[0]
        raise CheckpointError(
            f"{index.parent / file} has no weight {name}, which {index.name} says is there"
            + (f", and {len(lost) - 1} more" if len(lost) > 1 else "")
            + "\ncopy or download the checkpoint again",
            path=str(index.parent / file),
        )
    return {name: shards[file][name] for name, file in homes.items()}


def _torch_file(path: Path, *, mapped: bool) -> dict[str, Source]:
    OpenFile(path)  # says what is wrong with a file that is not there
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except RuntimeError:
            if not mapped:
                raise
            # Files of torch before 1.6 cannot be mapped.
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has many, and names the file in none
        raise CheckpointError(
            f"{path}: torch cannot load it: {str(error).splitlines()[0]}\ncopy or download it again",
            path=str(path),
        ) from error
    table = loaded if isinstance(loaded, Mapping) else {type(loaded).__name__: None}
    odd = [name for name, value in table.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(
            f"{path} is not a table of weights by name: {odd[0]!r} is not a tensor\n"
            "save state_dict() of the model itself",
            path=str(path),
        )
    return {name: InMemory(value.detach(), value.dtype) for name, value in loaded.items()}


def _offload_folder(folder: Path, *, mapped: bool) -> dict[str, Source]:
    """Open an offload folder of Accelerate: a file a weight, or safetensors."""
    files: dict[str, dict[str, Source]] = {}
    sources: dict[str, Source] = {}
    for name, entry in _read_json(folder / "index.json").items():
        other = entry.get("safetensors_file")
        if other is not None:
            if other not in files:
                files[other] = _file(Path(other), mapped=mapped)
            if (inner := entry.get("weight_name", name)) not in files[other]:
                raise CheckpointError(
                    f"{other} has no weight {inner}, which {folder / 'index.json'} says is there\n"
                    "offload the model again",
                    path=other,
                )
            sources[name] = files[other][inner]
            continue
        dtype = getattr(torch, str(entry["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"{folder / 'index.json'}: {name} has dtype {entry['dtype']!r}, which torch does not know\n"
                "offload the model again",
                path=str(folder),
            )
        file = OpenFile(folder / f"{name}.dat", mapped=mapped)
        weight = InFile(file, 0, tuple(entry["shape"]), dtype)
        if file.size != max(weight.size, 0):
            raise file._damaged(f"it has {file.size} bytes, and {name} has {weight.size}")
        sources[name] = weight
    return sources


def _own(folder: Path, *, mapped: bool) -> dict[str, Source]:
    """Open a checkpoint of accel-core."""
    files: dict[Path, OpenFile] = {}
    sources: dict[str, Source] = {}
    for names, stored in stored_weights(folder):
        dtype: torch.dtype = getattr(torch, stored.dtype)
        source: Source = InCheckpoint(stored, dtype)
        if stored.place is not None:
            path, start = stored.place
            if path not in files:
                files[path] = OpenFile(path, mapped=mapped)
            source = InFile(files[path], start, tuple(stored.shape), dtype)
        sources.update(dict.fromkeys(names, source))
    return sources


def _read_json(path: Path, key: str | None = None) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
        found: dict[str, Any] = value if key is None else value[key]
        return dict(found.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not an index of weights: {error}\ncopy or download it again", path=str(path)
        ) from error
