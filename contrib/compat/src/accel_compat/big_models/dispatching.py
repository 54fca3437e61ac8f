"""Models spread over devices, the CPU and the disk, by accel-big-models."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import nn

from accel_compat.big_models.balanced_memory import as_list
from accel_compat.big_models.device_maps import map_by_word
from accel_compat.big_models.dispatched_hooks import all_tensors, attach_dispatched_hooks
from accel_compat.big_models.hooks import MOVING_METHODS, remove_hook_from_module
from accel_compat.big_models.offload_folder import offload_unless_equal, read_offload_index
from accel_compat.modeling.loading import load_checkpoint_in_model, set_module_tensor_to_device
from accel_compat.modeling.sizes import find_place, find_tied_parameters, retie_parameters
from accel_compat.modeling.wrappers import recursive_getattr
from accel_compat.packages import load

_LOGGER: Final = logging.getLogger("accelerate.big_modeling")
_HOST: Final = ("cpu", "disk")


def dispatch_model(
    model: nn.Module,
    device_map: dict[str, str | int | torch.device],
    main_device: torch.device | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: dict[str, str] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Bring each module to its device, or keep it away until its block computes.

    Modules that are kept away are on the CPU or the disk.

    device_map: name of a module or tensor -> device, "cpu" or "disk".
    main_device: where modules on the CPU and the disk compute. Default: the first device in the map.
    state_dict: values of weights that are on the meta device.
    offload_dir: Accelerate's offload folder; weights on the disk are written there if they are in no file.
    offload_index: name of a weight on the disk -> its place in a safetensors file.
    preload_module_classes: means nothing here, as blocks come whole.
    """
    import_module("accelerate.big_modeling").check_device_map(model, device_map)  # transformers replaces it
    devices = set(device_map.values())
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    if len(devices) == 1 and "disk" not in devices and not force_hooks:
        return model.to(next(iter(devices)))
    _undo(model)
    whole_map = _with_all_tensors(model, device_map)
    if main_device is None:
        main_device = next((each for each in device_map.values() if each not in _HOST), "cpu")  # type: ignore[assignment]
    _dispatch(
        model, whole_map, main_device, state_dict, offload_dir, offload_index, offload_buffers, skip_keys
    )
    return model


def cpu_offload(
    model: nn.Module,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights on the CPU, and bring them to a device block by block.

    execution_device: default: where the first parameter is. state_dict: values of weights on meta.
    """
    device = next(model.parameters()).device if execution_device is None else execution_device
    _undo(model)
    _dispatch(model, {"": "cpu"}, device, state_dict, None, None, offload_buffers, None, everything=True)
    return model


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights in an offload folder; bring them to a device block by block.

    execution_device: default: where the first parameter is.
    """
    device: Any = next(model.parameters()).device if execution_device is None else execution_device
    device = "cpu" if device == torch.device("meta") else device
    _undo(model)
    _dispatch(model, {"": "disk"}, device, None, offload_dir, None, offload_buffers, None)
    return model


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | dict[str, int | str | torch.device] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, and dispatch it by a map, or by a word for one.

    device_map: "auto", "balanced", "balanced_low_0", "sequential", or as `dispatch_model` has it. Default:
    the model is loaded, and not dispatched.
    """
    if isinstance(device_map, str):
        device_map = map_by_word(
            model,
            device_map,
            max_memory,
            no_split_module_classes,
            dtype=dtype,
            offload_buffers=offload_buffers,
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def _dispatch(
    model: nn.Module,
    device_map: Mapping[str, Any],
    device: Any,
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: Any,
    offload_index: Mapping[str, Any] | None,
    offload_buffers: bool,
    skip_keys: Any,
    everything: bool = False,
) -> None:
    """Dispatch by the library, then attach what other libraries look for.

    everything: what lies on the CPU counts as offloaded where the CPU computes too.
    """
    places = {name: find_place(name, device_map) for name, _ in all_tensors(model)}
    places = {name: "cpu" if place == torch.device("cpu") else place for name, place in places.items()}
    _fill(model, state_dict or {}, places)
    on_disk = {name for name, place in places.items() if place == "disk"}
    resident = () if offload_buffers else [name for name, _ in model.named_buffers()]
    index = _index(model, on_disk.difference(resident), offload_dir, offload_index)
    folder = offload_dir if on_disk else None
    _engage(model, device_map, device, index, folder, as_list(skip_keys))
    streams = everything or str(device) not in ("cpu", "mps")
    on_host = {name for name, place in places.items() if place == "cpu" and streams}
    computed = {name: device if place in _HOST else place for name, place in places.items()}
    options = {"offload_buffers": offload_buffers, "skip_keys": skip_keys}
    attach_dispatched_hooks(model, computed, on_disk | on_host, index, folder, options)
    model._dispatched = True  # type: ignore[assignment]
    _guard(model, bool(on_disk | on_host))


def _with_all_tensors(model: nn.Module, device_map: Mapping[str, Any]) -> dict[str, Any]:
    """Add the tensors that the map leaves out on purpose: they stay where they are."""
    if "" in device_map:
        return dict(device_map)
    prefixes = tuple(f"{name}." for name in device_map)
    left = {name: tensor.device for name, tensor in all_tensors(model) if not f"{name}.".startswith(prefixes)}
    return {**device_map, **{name: "cpu" if found.type == "meta" else found for name, found in left.items()}}


def _fill(model: nn.Module, state: Mapping[str, torch.Tensor], places: Mapping[str, Any]) -> None:
    """Put a state dict's values into the weights on the CPU, and keep ties."""
    tied = find_tied_parameters(model)
    for name, value in state.items():
        if places.get(name) == "cpu":
            old = recursive_getattr(model, name)
            if old.is_meta or old.data_ptr() != value.data_ptr():
                set_module_tensor_to_device(model, name, "cpu", value)
    retie_parameters(model, tied)


def _index(
    model: nn.Module, on_disk: set[str], folder: Any, index: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return name -> place in a file, of the weights on the disk.

    A weight that is in no file is written into the folder.

    Raises:
        ValueError: there is no folder, or it holds other weights under the same names.
    """
    if not on_disk:
        return {}
    if folder is None and index is None:
        raise ValueError(
            "We need an `offload_dir` to dispatch this model according to this `device_map`, the following"
            f" submodules need to be offloaded: {', '.join(sorted(on_disk))}."
        )
    found = {} if index is None else {name: index[name] for name in on_disk if name in index}
    if folder is None:
        return found
    real = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name in on_disk and name not in found and not tensor.is_meta
    }
    if index is None:
        offload_unless_equal(folder, real)
    there = read_offload_index(folder)
    return {**{name: there[name] for name in on_disk if name in there}, **found}


def _engage(
    model: nn.Module,
    device_map: Mapping[str, Any],
    device: Any,
    index: Mapping[str, Any],
    folder: Any,
    skip_keys: list[str],
) -> None:
    """Have accel-big-models dispatch the model; map weights on the disk from files."""
    from_map, dispatch, read = (
        load(f"accel_big_models:{name}", "dispatch_model") for name in ("plan_from_map", "dispatch", "load")
    )
    plan = attrs.evolve(from_map(model, device_map), device=from_map(model, {"": device}).device)
    if not index:
        dispatch(model, plan, skip_keys=skip_keys)
        return
    with tempfile.TemporaryDirectory() as links:
        Path(links, "index.json").write_text(json.dumps(index), encoding="utf-8")
        for name in (name for name, info in index.items() if info.get("safetensors_file") is None):
            Path(links, f"{name}.dat").symlink_to(Path(folder, f"{name}.dat").absolute())
        read(model, links, plan, strict=False, skip_keys=skip_keys)


def _undo(model: nn.Module) -> None:
    """Give a dispatched model all its weights back; it may be inside of this one."""
    for module in model.modules():
        if hasattr(module, "_dispatched"):
            remove_hook_from_module(module, recurse=True)


def _guard(model: Any, offloaded: bool) -> None:
    """Warn of calls that move the model, and refuse them where weights come and go."""
    for name in MOVING_METHODS:
        if hasattr(type(model), name):  # a partial of the model: a copy of the model moves the copy
            setattr(model, name, partial(_move, model, name, offloaded))


def _move(model: nn.Module, method: str, offloaded: bool, *args: Any, **kwargs: Any) -> Any:
    if method != "to" or torch._C._nn._parse_to(*args, **kwargs)[0] is not None:
        _LOGGER.warning("You shouldn't move a model that is dispatched using accelerate hooks.")
    if offloaded:
        raise RuntimeError("You can't move a model that has some modules offloaded to cpu or disk.")
    return getattr(type(model), method)(model, *args, **kwargs)
