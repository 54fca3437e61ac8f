"""Weights from files into a model, one tensor after the other.

Weights that the device map leaves on the disk stay there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from accel_compat.big_models.offload_folder import offload_weight, save_offload_index
from accel_compat.modeling.sizes import (
    find_place,
    find_tied_parameters,
    load_state_dict,
    refuse_absent_devices,
    retie_parameters,
)
from accel_compat.unsupported import NotServedError

_NAMES: Final = ("model.safetensors", "pytorch_model.bin")


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: torch.Tensor | None = None,
    dtype: Any = None,
    fp16_statistics: torch.HalfTensor | None = None,
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move one parameter or buffer to a device, or put a new value there."""
    *path, name = tensor_name.split(".")
    home = module.get_submodule(".".join(path))
    if name not in home._parameters and name not in home._buffers:
        raise ValueError(f"{home} does not have a parameter or a buffer named {name}.")
    old = getattr(home, name)
    sources = [tensor for tensor in (value, old) if tensor is not None]
    copies = [(tied_params_map or {}).get(tensor.data_ptr()) for tensor in sources]
    for known in copies:
        if known is not None and device in known:
            home._parameters[name] = known[device]  # type: ignore[assignment]
            return
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise ValueError(f"{name} is on the meta device, we need a `value` to put in on {device}.")
    if value is not None and old.shape != value.shape:
        raise ValueError(
            f'Trying to set a tensor of shape {value.shape} in "{name}" (which has shape {old.shape}), this'
            " looks incorrect."
        )
    moved = _moved(old, value, device, dtype, non_blocking)
    if name in home._buffers:
        home._buffers[name] = moved
    elif value is not None or (old.device, old.dtype) != (moved.device, moved.dtype):
        moved = home._parameters[name] = type(old)(moved, requires_grad=old.requires_grad)
        if fp16_statistics is not None:
            moved.SCB = fp16_statistics.to(device)
    for known in reversed(copies):
        if known is not None:
            known[device] = moved
            break


def _moved(
    old: torch.Tensor, value: torch.Tensor | None, device: Any, dtype: Any, non_blocking: bool
) -> torch.Tensor:
    """Move a value, in the dtype asked for or the old tensor's, to the device."""
    kind = old.dtype if dtype is None else dtype
    if value is not None:
        value = value.to(kind if dtype is None or value.is_floating_point() else value.dtype)
    elif torch.device(device).type == "meta" and old.is_floating_point():
        value = old.to(kind)
    with torch.no_grad():
        return (old if value is None else value).detach().to(device, non_blocking=non_blocking)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a file, an index or a folder of weights, each to its module's device.

    full_state_dict, broadcast_from_rank0, offload_state_dict: change nothing. Each rank reads the weights of
    its own model from the file, which all ranks must see, and one shard at a time is in memory.
    """
    if offload_8bit_bnb:
        raise NotServedError(
            "offload_8bit_bnb: accel-bitsandbytes offloads what it quantizes\n"
            "leave it out, and call load_and_quantize_model"
        )
    refuse_absent_devices(device_map or {})
    to_disk = "disk" in (device_map or {}).values()
    if to_disk and offload_folder is None:
        raise ValueError(
            "At least one of the model submodule will be offloaded to disk, please pass along an"
            " `offload_folder`."
        )
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."))
    wanted = model.state_dict()
    tied = find_tied_parameters(model)
    unexpected: list[str] = []
    loaded: set[str] = set()
    left_out = set() if offload_buffers else {name for name, _ in model.named_buffers()}
    index: dict[str, Any] = {}
    for file in _files(Path(checkpoint)):
        for name, value in load_state_dict(file).items():
            loaded.add(name)
            if name not in wanted:
                unexpected.append(name)
                continue
            device, kind = (
                _device(name, device_map, wanted[name]),
                _dtype(name, dtype, value, keep_in_fp32_modules or ()),
            )
            if device == "disk" and name not in left_out:
                kind = kind or value.dtype
                _leave_on_disk(file, name, value, kind, offload_folder, index)
                set_module_tensor_to_device(model, name, "meta", dtype=kind)
                continue
            device = "cpu" if device == "disk" else device
            set_module_tensor_to_device(model, name, device, value, kind)
    if to_disk:
        save_offload_index(index, offload_folder)
    # A file may hold one of a weight's names only, and not the first.
    retie_parameters(model, [sorted(names, key=lambda name: name not in loaded) for names in tied])
    missing = wanted.keys() - loaded - {name for names in tied for name in names if loaded & set(names)}
    _report(model, checkpoint, unexpected, sorted(missing), strict)


def _leave_on_disk(
    file: Path, name: str, value: torch.Tensor, dtype: torch.dtype, folder: Any, index: dict[str, Any]
) -> None:
    """Note the place of a weight in its safetensors file.

    A weight of another file is written into the folder.
    """
    os.makedirs(folder, exist_ok=True)
    if file.suffix != ".safetensors":
        offload_weight(value.to(dtype), name, folder, index)
        return
    kind = str(dtype).removeprefix("torch.")
    index[name] = {"safetensors_file": str(file.absolute()), "weight_name": name, "dtype": kind}


def _report(
    model: nn.Module, checkpoint: Any, unexpected: list[str], missing: list[str], strict: bool
) -> None:
    kind = type(model).__name__
    if strict and (unexpected or missing):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {kind}: unexpected keys {unexpected}, missing keys {missing}"
        )
    logger = logging.getLogger("accelerate.utils.modeling")
    if unexpected:
        logger.warning(
            "Some weights of the model checkpoint at %s were not used when initializing %s: %s",
            *(checkpoint, kind, unexpected),
        )
    empty = [name for name, tensor in model.state_dict().items() if name in missing and tensor.is_meta]
    if empty:
        raise ValueError(
            f"{checkpoint} lacks weights of {kind} that are on the meta device: {', '.join(empty)}\n"
            "load a checkpoint that has them, or make the model without init_empty_weights"
        )
    if missing:
        logger.warning("Some weights of %s are not in %s and stay as they are: %s", kind, checkpoint, missing)


def _files(checkpoint: Path) -> Iterator[Path]:
    if checkpoint.is_dir():
        whole = [checkpoint / name for name in _NAMES if (checkpoint / name).is_file()]
        indices = sorted(checkpoint.glob("*.index.json"))
        if not whole and len(indices) != 1:
            raise ValueError(
                f"{checkpoint} is not a folder containing a `.index.json` file or a {_NAMES[1]} or a"
                f" {_NAMES[0]} file; it has {len(indices)} indices"
            )
        checkpoint = whole[0] if whole else indices[0]
    elif not checkpoint.is_file():
        raise ValueError(
            "`checkpoint` should be the path to a file containing a whole state dict, or the index of a"
            " sharded checkpoint, or a folder containing a sharded checkpoint or the whole state dict, got"
            f" {checkpoint}."
        )
    if not checkpoint.name.endswith(".json"):
        yield checkpoint
        return
    index = json.loads(checkpoint.read_text(encoding="utf-8"))
    yield from (checkpoint.parent / name for name in sorted(set(index.get("weight_map", index).values())))


def _device(name: str, device_map: Mapping[str, Any] | None, old: torch.Tensor) -> Any:
    """Find a tensor's device in the map; without a map, the tensor's own."""
    if device_map is None:
        return "cpu" if old.is_meta else old.device
    place = find_place(name, device_map)
    if place is None:
        raise ValueError(f"{name} doesn't have any device set.\nname its module in the device_map")
    return place


def _dtype(name: str, asked: Any, value: torch.Tensor, kept: Sequence[str]) -> Any:
    if asked is None or not value.is_floating_point():
        return None
    return torch.float32 if any(f"{part}." in name or part == name for part in kept) else asked
