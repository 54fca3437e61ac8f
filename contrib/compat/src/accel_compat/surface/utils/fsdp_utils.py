"""Whole states of models that FSDP shards, in one file each, as programs for Accelerate save them apart."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from accel_compat.refusing import unserved

from .constants import FSDP_MODEL_NAME, OPTIMIZER_NAME

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def enable_fsdp_ram_efficient_loading() -> None:
    """Let transformers load weights on rank 0 only."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Let transformers load weights on all ranks."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def _file(folder: Any, name: str, index: int) -> Path:
    return Path(folder, f"{name}.bin" if index == 0 else f"{name}_{index}.bin")


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the model's whole weights, from the main process. Collective."""
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        os.makedirs(output_dir, exist_ok=True)
        accelerator.save(state, _file(output_dir, FSDP_MODEL_NAME, model_index))
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_model` wrote into the sharded model. Collective."""
    state = torch.load(_file(input_dir, FSDP_MODEL_NAME, model_index), map_location="cpu", weights_only=True)
    set_model_state_dict(model, state, options=_WHOLE)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: Any,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the optimizer's whole state, from the main process. Collective."""
    state = get_optimizer_state_dict(model, _inner(optimizer), options=_WHOLE)
    if accelerator.is_main_process:
        os.makedirs(output_dir, exist_ok=True)
        accelerator.save(state, _file(output_dir, OPTIMIZER_NAME, optimizer_index))
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: Any,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_optimizer` wrote. Collective."""
    state = torch.load(
        _file(input_dir, OPTIMIZER_NAME, optimizer_index), map_location="cpu", weights_only=True
    )
    set_optimizer_state_dict(model, _inner(optimizer), state, options=_WHOLE)


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def ensure_weights_retied(param_init_fn: Any, model: nn.Module, device: Any) -> Any:
    """The function as it is: accel-fsdp keeps ties."""
    return param_init_fn


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    """The parameters of modules, or of those whose names a regular expression matches, on the device."""
    import re

    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [part for name, part in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for part in modules for parameter in part.to(device).parameters()}


__getattr__ = unserved(__name__)
