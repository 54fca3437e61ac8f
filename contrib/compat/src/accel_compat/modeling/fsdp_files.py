"""Files of weights and optimizer states of models that FSDP shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from accel_compat.environment.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accel_compat.modeling.wrappers import is_peft_model
from accel_compat.unsupported import NotServedError


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the model's weights as the plugin's `state_dict_type` says. Collective.

    Whole into one file, from the main process; or in shards into a folder by torch's checkpointing, without
    `use_dcp` into a file for each rank. adapter_only: of a peft model, what is trained.
    """
    options = _options(fsdp_plugin, frozen=not (adapter_only and is_peft_model(model)))
    state = get_model_state_dict(model, options=options)
    place = _Place(fsdp_plugin, accelerator, output_dir, FSDP_MODEL_NAME, model_index, use_dcp)
    _write(place, "model", state)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read what `save_fsdp_model` wrote into the sharded model. Collective."""
    accelerator.wait_for_everyone()
    whole = not (adapter_only and is_peft_model(model))
    options = _options(fsdp_plugin, frozen=whole)
    place = _Place(fsdp_plugin, accelerator, input_dir, FSDP_MODEL_NAME, model_index, use_dcp)
    state = _read(place, "model", lambda: get_model_state_dict(model, options=options))
    return set_model_state_dict(model, state, options=replace(options, strict=whole))


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: Any,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the optimizer's state, as `save_fsdp_model` writes weights. Collective."""
    state = get_optimizer_state_dict(model, _inner(optimizer), options=_options(fsdp_plugin))
    place = _Place(fsdp_plugin, accelerator, output_dir, OPTIMIZER_NAME, optimizer_index, use_dcp)
    _write(place, "optimizer", state)


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
    accelerator.wait_for_everyone()
    options, inner = _options(fsdp_plugin), _inner(optimizer)
    place = _Place(fsdp_plugin, accelerator, input_dir, OPTIMIZER_NAME, optimizer_index, use_dcp)
    state = _read(place, "optimizer", lambda: get_optimizer_state_dict(model, inner, options=options))
    set_optimizer_state_dict(model, inner, state, options=options)


class _Place:
    """Paths of a state: one file, a folder of shards, or a file for each rank."""

    def __init__(
        self, plugin: Any, accelerator: Any, folder: Any, name: str, index: int, use_dcp: bool
    ) -> None:
        self.main, self.wait = accelerator.is_main_process, accelerator.wait_for_everyone
        self.whole, self.shards = _is_whole(plugin), use_dcp
        self.folder = Path(folder, f"{name}_{index}")
        if self.folder.name == Path(folder).name:  # given as the folder of the shards itself
            self.folder = Path(folder)
        self.file = Path(folder, f"{name}.bin" if index == 0 else f"{name}_{index}.bin")
        if not self.whole:
            self.file = Path(folder, f"{name}_{index}_rank{accelerator.process_index}.bin")


def _is_whole(plugin: Any) -> bool:
    kind = plugin.state_dict_type
    word = str(getattr(kind, "name", kind)).upper()
    if word == "LOCAL_STATE_DICT":
        raise NotServedError(
            "state_dict_type LOCAL_STATE_DICT: flat parts of weights fit this world and this wrapping only\n"
            "take SHARDED_STATE_DICT, or FULL_STATE_DICT"
        )
    return word != "SHARDED_STATE_DICT"


def _options(plugin: Any, *, frozen: bool = True) -> StateDictOptions:
    return StateDictOptions(
        full_state_dict=_is_whole(plugin), cpu_offload=True, ignore_frozen_params=not frozen
    )


def _write(place: _Place, sort: str, state: Any) -> None:
    place.file.parent.mkdir(parents=True, exist_ok=True)
    if not place.whole and place.shards:
        state_dict_saver.save({sort: state}, checkpoint_id=place.folder)
    elif place.main or not place.whole:
        torch.save(state, place.file)
    place.wait()


def _read(place: _Place, sort: str, like: Callable[[], Any]) -> Any:
    if place.whole or not place.shards:
        return torch.load(place.file, map_location="cpu", weights_only=True)
    state = {sort: like()}
    state_dict_loader.load(state, checkpoint_id=place.folder)
    return state[sort]


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    """Collect the parameters of modules, or of those that a regular expression names."""
    import re

    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [part for name, part in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for part in modules for parameter in part.to(device).parameters()}
