"""Accelerate's offload folders.

Each has a raw file for each tensor, and an index of dtypes and shapes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

_INDEX: Final = "index.json"


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: Any, index: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Write one tensor to `weight_name`.dat, and its dtype and shape into the index.

    The file replaces an older one at once, so that a model which reads the older one goes on with it.
    """
    kept = weight.detach().to("cpu").contiguous()
    if index is not None:
        dtype = str(weight.dtype).removeprefix("torch.")
        index[weight_name] = {"dtype": dtype, "shape": list(weight.shape)}
    file = Path(offload_folder, f"{weight_name}.dat")
    _replace(file, kept.reshape(-1).view(torch.uint8).numpy().data if kept.numel() else b"")
    return index


def load_offloaded_weight(weight_file: Any, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Map the file of one tensor; writes to the tensor stay in this process."""
    dtype, shape = getattr(torch, weight_info["dtype"]), tuple(weight_info["shape"])
    count = math.prod(shape)
    wanted, found = count * dtype.itemsize, os.path.getsize(weight_file)
    if found < wanted:
        raise OSError(
            f"{weight_file} holds {found} bytes, but its index says {dtype} of shape {shape}: {wanted} bytes"
            "\noffload the model again, into an empty folder"
        )
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(weight_file), shared=False, size=count, dtype=dtype).view(shape)


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: Any) -> None:
    """Add entries to a folder's index.json."""
    if not index:
        return
    merged = {**read_offload_index(offload_folder), **index}
    _replace(Path(offload_folder, _INDEX), json.dumps(merged, indent=2).encode())


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: dict[str, torch.Tensor]) -> None:
    """Write each tensor of a state dict into a folder, and its index."""
    os.makedirs(save_dir, exist_ok=True)
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def read_offload_index(folder: Any) -> dict[str, Any]:
    """Return name -> dtype and shape, or place in a safetensors file.

    Empty if the folder has no index.
    """
    file = Path(folder, _INDEX)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def offload_unless_equal(folder: Any, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors that a folder does not hold.

    Raises:
        ValueError: it holds another one under the same name, as of another model.
    """
    known = read_offload_index(folder)
    for name in (name for name in state_dict if name in known):
        found, tensor = OffloadedWeightsLoader(save_folder=folder)[name], state_dict[name].cpu()
        if (found.dtype, found.shape) != (tensor.dtype, tensor.shape) or not torch.equal(
            found.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        ):
            raise ValueError(
                f"{folder} holds the offloaded weights of another model: {name} differs from this model's\n"
                "give an empty folder, or remove this one"
            )
    missing = {name: tensor for name, tensor in state_dict.items() if name not in known}
    offload_state_dict(folder, missing)


def _replace(file: Path, content: Any) -> None:
    """Write a file beside the one it replaces, and remove it where that fails."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """Entries of a mapping that start with a prefix, under the rest of their names."""

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self.dataset if key.startswith(self.prefix)])

    def __len__(self) -> int:
        return len(self.dataset)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name.

    A weight is that of a state dict, else of an offload folder, else of a safetensors file.

    index: name -> dtype and shape, or `safetensors_file`, `weight_name` and dtype. Default: the folder's.
    device: where tensors of safetensors files are read to.
    """

    def __init__(
        self,
        state_dict: dict[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError(
                "Need either a `state_dict`, a `save_folder` or an `index` containing offloaded weights."
            )
        if index is None and save_folder is not None:
            index = json.loads(Path(save_folder, _INDEX).read_text(encoding="utf-8"))
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self.index: Mapping[str, Any] = {} if index is None else index
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        if info.get("safetensors_file") is None:
            return load_offloaded_weight(os.path.join(self.save_folder or "", f"{key}.dat"), info)
        with safe_open(info["safetensors_file"], framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(info.get("weight_name", key))
        dtype = getattr(torch, info["dtype"]) if "dtype" in info else tensor.dtype
        return tensor.to(dtype).to("cpu" if self.device is None else self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def extract_submodules_state_dict(
    state_dict: dict[str, torch.Tensor], submodule_names: list[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict for modules or tensors of these names."""
    return {
        key: tensor
        for name in submodule_names
        for key, tensor in state_dict.items()
        if key == name or key.startswith(f"{name}.")
    }
