"""Sizes, names and ties of a model's weights: what needs no device map."""

from __future__ import annotations

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from accel_compat import runs
from accel_compat.configs.enums import CustomDtype
from accel_compat.state.states import AcceleratorState

_UNITS = {"GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_KEPT = ("torch.uint", "torch.int", "torch.bool")


def get_mixed_precision_context_manager(native_amp: bool = False, autocast_kwargs: Any = None) -> Any:
    """Return torch's autocast in the AcceleratorState's precision.

    Without `native_amp` the context does nothing.
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(state.mixed_precision)
    given = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return torch.autocast(state.device.type, dtype=dtype, **given)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler for the newest run's device, or this machine's."""
    run = runs.newest()
    kind = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return torch.amp.GradScaler((kind if run is None else run.device).type, **kwargs)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Tell whether two devices are one; without a number it is the first."""

    def numbered(device: torch.device) -> tuple[str, int]:
        return device.type, device.index or 0

    return numbered(first_device) == numbered(second_device)


def convert_file_size_to_int(size: float | str) -> int:
    """Bytes of a size such as '5GB', '5Gb' (bits) or '5GiB'."""
    wrong = (
        f"`size` {size} is not in a valid format. Use an integer for bytes, or a string with an unit (like"
        " '5.0GB')."
    )
    if isinstance(size, (int, float)):
        found = int(size)
    else:
        unit = next((unit for unit in _UNITS if size.upper().endswith(unit)), None)
        try:
            found = int(float(size[: -len(unit or "")]) * _UNITS[unit or ""])
        except (KeyError, ValueError) as error:
            raise ValueError(wrong) from error
        if size.endswith("b"):
            found //= 8
    if found < 0:
        raise ValueError(wrong)
    return found


def dtype_byte_size(dtype: Any) -> float:
    """Bytes of one value."""
    small = {torch.bool: 1 / 8, CustomDtype.INT2: 1 / 4, CustomDtype.INT4: 1 / 2, CustomDtype.FP8: 1}
    if dtype in small:
        return small[dtype]
    dtype = _get_proper_dtype(dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"`dtype` is not a valid dtype: {dtype}.")
    return dtype.itemsize


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return (device, address, bytes) of a tensor's storage.

    Tensors that share a storage have the same.
    """
    if tensor.device.type == "meta":
        return tensor.device, 0, tensor.nbytes
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each parameter and buffer."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse) if remove_non_persistent else set()
        yield from (
            (name, tensor) for name, tensor in module.named_buffers(recurse=recurse) if name not in left_out
        )


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of the buffers that no state dict holds."""
    found = set(module._non_persistent_buffers_set)
    if recurse:
        for name, part in module.named_modules():
            names = part._non_persistent_buffers_set
            found |= {f"{name}.{buffer}" for buffer in names} if fqns else names
    return found


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return groups of names that mean one parameter, each sorted."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie each group of names again.

    They get its first parameter off the meta device, or the first of all.
    """
    for group in filter(None, tied_params):
        parameters = [attrgetter(name)(model) for name in group]
        kept = next((each for each in parameters if each.device.type != "meta"), parameters[0])
        for name in group:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, kept)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Tell whether a model of transformers says in its config that weights are tied."""
    if not any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    words = getattr(config, "tie_word_embeddings", False) and model.get_output_embeddings() is not None  # type: ignore[operator]
    coders = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool(words or coders or any(hasattr(part, "_tie_weights") for part in model.modules()))


def _get_proper_dtype(dtype: Any) -> Any:
    return getattr(torch, dtype.replace("torch.", ""), dtype) if isinstance(dtype, str) else dtype


def compute_module_sizes(
    model: nn.Module,
    dtype: Any = None,
    special_dtypes: dict[str, Any] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of each module, parameter and buffer by name; "" is the model.

    dtype: what floating-point tensors would be converted to, where that is smaller.
    special_dtypes: what these would be converted to.
    """
    sizes: dict[str, Any] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    limit = None if dtype is None else dtype_byte_size(dtype)
    special = {name: dtype_byte_size(each) for name, each in (special_dtypes or {}).items()}
    for name, tensor in tensors:
        own = dtype_byte_size(tensor.dtype)
        if name in special:
            own = special[name]
        elif limit is not None and not str(tensor.dtype).startswith(_KEPT):
            own = min(limit, own)
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += tensor.numel() * own
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Any = None, special_dtypes: dict[str, Any] | None = None
) -> int:
    """Bytes of all buffers."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: list[tuple[str, Any]], module_sizes: dict[str, int], no_split_module_classes: Sequence[str]
) -> tuple[int, list[str]]:
    """(bytes of the largest part that is not split, names of all parts of that size)."""
    largest, names = 0, list[str]()
    waiting = list(modules)
    while waiting:
        name, module = waiting.pop(0)
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in no_split_module_classes:
            waiting = [(f"{name}.{child}", part) for child, part in children] + waiting
        elif module_sizes[name] > largest:
            largest, names = module_sizes[name], [name]
        elif module_sizes[name] == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """(bytes of the model, (bytes of its largest layer, names of such layers))."""
    sizes = compute_module_sizes(model)
    parts = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], get_max_layer_size(parts, sizes, getattr(model, "_no_split_modules", None) or [])


def get_module_leaves(module_sizes: dict[str, int]) -> list[str]:
    """Names without children."""
    parents = {name.rpartition(".")[0] for name in module_sizes if "." in name}
    return [name for name in module_sizes if name and name not in parents]


def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, int]:
    """Return the bytes that are free on each device, by number, and on "cpu".

    If `max_memory` is given, its sizes are returned, in bytes.
    """
    if max_memory is not None:
        sized = {
            key: convert_file_size_to_int(value) if isinstance(value, str) else value
            for key, value in max_memory.items()
        }
        unknown = [key for key in sized if not isinstance(key, int) and key not in ("mps", "cpu", "disk")]
        if unknown:
            raise ValueError(
                f"Device {unknown[0]} is not recognized, available devices are integers(for GPU/XPU), 'mps',"
                " 'cpu' and 'disk'"
            )
        numbers = sorted(key for key in sized if isinstance(key, int))
        return {
            key: sized[key] for key in [*numbers, *(key for key in ("mps", "cpu", "disk") if key in sized)]
        }
    found: dict[Any, int] = {}
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is not None and kind.type != "mps":
        module = torch.get_device_module(kind)
        found = {number: module.mem_get_info(number)[0] for number in range(torch.accelerator.device_count())}
    found["mps" if kind is not None and kind.type == "mps" else "cpu"] = _free_host_memory()
    return found


def _free_host_memory() -> int:
    """Available memory by Linux; elsewhere the free pages."""
    try:
        with open("/proc/meminfo") as file:
            found = re.search(r"MemAvailable:\s+(\d+) kB", file.read())
    except OSError:
        found = None
    if found:
        return int(found.group(1)) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Join entries of equal device that make up a whole module, in place."""
    prefix = "" if module_name == "" else f"{module_name}."
    inside = {name: device for name, device in device_map.items() if name.startswith(prefix)}
    if len(inside) > 1 and len(set(inside.values())) == 1:
        for name in inside:
            del device_map[name]
        device_map[module_name] = next(iter(inside.values()))
    depth = len(module_name.split(".")) + 1 if module_name else 1
    below = [name for name in device_map if name.startswith(prefix) and len(name) > len(module_name)]
    for child in {".".join(name.split(".")[:depth]) for name in below}:
        clean_device_map(device_map, child)
    return device_map


def find_place(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of the innermost module that a map has of a tensor, or None."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def check_device_map(model: nn.Module, device_map: dict[str, Any]) -> None:
    """Raise ValueError if the map leaves a weight out; warn of unknown modules."""
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())}
    unknown = sorted(set(device_map) - names)
    if unknown:
        warnings.warn(f"The following device_map keys do not match any submodules: {unknown}", stacklevel=2)
    left = [name for name in model.state_dict() if find_place(name, device_map) is None]
    if left:
        raise ValueError(
            "The device_map provided does not give any device for the following parameters:"
            f" {', '.join(left)}"
        )


def refuse_absent_devices(device_map: Mapping[str, Any]) -> None:
    """Raise ValueError for a place of the map that this machine does not have."""
    for name, place in device_map.items():
        try:
            torch.empty(0, device="cpu" if place == "disk" else place)
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            raise ValueError(
                f"the device_map puts {name or 'the model'} on {place!r}, which is not here: {error}\n"
                "name devices that this process sees, 'cpu' or 'disk'"
            ) from error


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Load tensors of a .safetensors or torch file, without running code.

    device_map: name of a module -> device; what is in none, or on "disk", is mapped to the CPU.
    """
    if not str(checkpoint_file).endswith(".safetensors"):
        loaded: dict[str, torch.Tensor] = torch.load(checkpoint_file, map_location="cpu", weights_only=True)
        return loaded
    places = {name: "cpu" if device == "disk" else device for name, device in (device_map or {}).items()}
    if len(set(places.values())) == 1:
        return load_file(checkpoint_file, device=next(iter(places.values())))
    tensors = load_file(checkpoint_file)
    for name in tensors:
        tensors[name] = tensors[name].to(find_place(name, places))
    return tensors
