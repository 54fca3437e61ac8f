"""Small helpers that belong nowhere else."""

from __future__ import annotations

import logging
import platform
import socket
from collections import OrderedDict
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import nn

from accel_compat import runs
from accel_compat.environment.libraries import is_peft_available
from accel_compat.modeling.regional_compilation import is_wrapped
from accel_compat.modeling.sizes import id_tensor_storage
from accel_core import CheckpointError, Run, ops, unwrap_model

load = ops.load


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the tensor-parallel degree that a transformers model was loaded with."""
    held = getattr(getattr(model, "config", None), "distributed_config", None)
    known = held.get("tp_size") if isinstance(held, dict) else getattr(held, "tp_size", None)
    own: int | None = getattr(model, "tp_size", None)
    return known if own is None else own


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the user's own model inside what wraps it.

    recursive: unwrap all its parts too, in place: each stands for its attribute `module`, if it has one.
    """
    inner = _unwrapped(model, keep_fp32_wrapper, keep_torch_compile)
    return _without_modules(inner) if recursive else inner


def _without_modules(model: nn.Module) -> nn.Module:
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    for name, part in model.named_children():
        setattr(model, name, _without_modules(part))
    return model


def _unwrapped(model: Any, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> Any:
    run = runs.newest()
    if run is not None and run.prepared.form_of(model) is not None:
        return unwrap_model(run, model, keep_contexts=keep_fp32_wrapper, keep_compiled=keep_torch_compile)
    compiled = model if is_wrapped(model) or "_orig_mod" in vars(model) else None
    inner = model if compiled is None else compiled._orig_mod
    while isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        inner = inner.module
    if run is not None and not keep_fp32_wrapper:  # a copy of a prepared model
        inner = unwrap_model(run, inner, keep_contexts=False)
    if compiled is None or not keep_torch_compile:
        return inner
    if inner is not compiled._orig_mod:
        compiled._orig_mod = inner
    return compiled


def is_peft_model(model: Any) -> bool:
    """Tell whether peft wraps it."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model), PeftModel)


def wait_for_everyone() -> None:
    """Return once every rank is here. Collective."""
    run = runs.newest()
    if run is not None and run.world.size > 1:
        ops.wait_for_everyone(run=run)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Without the later names of one tensor; each contiguous, in memory of its own."""
    kept: dict[str, Any] = {}
    views: set[Any] = set()
    for name, value in state_dict.items():
        view = _view(value)
        if view is None or view not in views:
            kept[name] = value
        views.add(view)
    if len(kept) < len(state_dict):
        logging.getLogger("accelerate.utils.other").warning(
            "Removed shared tensor %s while saving: it is saved under another name",
            set(state_dict) - set(kept),
        )
    return _in_own_memory(kept)


def _view(value: Any) -> Any:
    """Return what two names of one tensor share, or None.

    None for what is not a tensor, and where there is no memory to compare.
    """
    if not _has_memory(value) or (storage := id_tensor_storage(value))[1] == 0:
        return None
    return storage, value.storage_offset(), value.shape, value.stride(), value.dtype


def _has_memory(value: Any) -> bool:
    """Tell whether a value is a tensor with one memory: a sparse one has several."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _in_own_memory(named: Mapping[str, Any]) -> dict[str, Any]:
    """Make tensors contiguous, and copy later views of memory that is seen already."""
    apart: dict[str, Any] = {}
    storages: set[Any] = set()
    for name, value in named.items():
        if not _has_memory(value):
            apart[name] = value
            continue
        storage = id_tensor_storage(value)
        shared = storage[1] != 0 and storage in storages
        apart[name] = value.contiguous().clone() if shared else value.contiguous()
        storages.add(storage)
    return apart


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object once: on the main process, or on the first one of each node."""
    save_of(runs.find_or_make(False), obj, f, save_on_each_node, safe_serialization)


def save_of(run: Run, obj: Any, f: Any, save_on_each_node: bool, safe_serialization: bool) -> None:
    """Write a run's object once.

    As safetensors, a state dict holds a tied weight once, and any other dict holds all of its names.
    """
    if run.world.local_rank != 0 if save_on_each_node else run.world.rank != 0:
        return
    if safe_serialization and isinstance(obj, OrderedDict):
        obj = clean_state_dict_for_safetensors(obj)
    elif safe_serialization and isinstance(obj, dict):
        obj = _in_own_memory(obj)
    try:
        ops.save(obj, f, save_on_each_node, safe_serialization, run=run)
    except CheckpointError as error:
        if isinstance(error.__cause__, (TypeError, ValueError)):  # programs catch safetensors' own
            raise error.__cause__ from error
        raise


def is_port_in_use(port: int | str | None = None) -> bool:
    """Tell whether something listens on this port of this machine; default 29500."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", int(port or 29500))) == 0


def get_free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def convert_bytes(size: float) -> str:
    """Return the size in the unit that fits it."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def check_os_kernel() -> None:
    """Say so if Linux is too old for processes not to hang."""
    if platform.system() != "Linux":
        return
    found = platform.release().split("-")[0]
    try:
        old = tuple(int(part) for part in found.split(".")[:2]) < (5, 5)
    except ValueError:
        return
    if old:
        logging.getLogger("accelerate.utils.other").warning(
            f"Detected kernel version {found}, which is below the recommended minimum of 5.5.0; this can"  # noqa: G004  the message says it
            " cause the process to hang. It is recommended to upgrade the kernel."
        )


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute of an attribute, with dots between."""
    return reduce(getattr, attr.split("."), obj)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """All modules, children before parents, the model last."""
    waiting, found = [("", model)], list[tuple[str, nn.Module]]()
    while waiting:
        name, parent = waiting.pop()
        found.append((name, parent))
        waiting += [(f"{name}.{child}" if name else child, part) for child, part in parent.named_children()]
    return [pair if return_fqns else pair[1] for pair in reversed(found)]
