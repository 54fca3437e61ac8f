"""Places of a quantised model, by the sizes that its weights will have."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import bitsandbytes as bnb
import torch
from torch import nn

from accel_big_models import plan, plan_from_map
from accel_bitsandbytes.choosing import Choice, choose
from accel_bitsandbytes.converting import cast, outline
from accel_core import ConfigError

if TYPE_CHECKING:
    from accel_big_models import Plan

__all__ = ["HOST", "DeviceMap", "planned", "quantised_outline", "usual_device"]

HOST: Final = ("cpu", "disk")
WORDS: Final = ("auto", "sequential")

DeviceMap = Mapping[str, str | int | torch.device]
"""Name of a module -> its place."""


def planned(
    model: nn.Module,
    config: Any,
    choice: Choice,
    device_map: DeviceMap | str | None,
    whole: Sequence[str] | None,
    memory: Any,
) -> Plan:
    """Plan by the sizes that the weights will have."""
    small = _outline(model, config, choice)
    if isinstance(device_map, str) and device_map not in WORDS:
        raise ConfigError(
            f"device_map is {device_map!r}\n"
            f"give one of {', '.join(WORDS)}, or a mapping; accel-compat serves Accelerate's other words"
        )
    if isinstance(device_map, str):
        made = plan(small, memory, whole=whole)
    elif device_map is not None and not isinstance(device_map, Mapping):
        raise ConfigError(f"device_map is {device_map!r}\nfor the whole model in one place, {{'': place}}")
    else:
        made = plan_from_map(small, {"": usual_device()} if device_map is None else device_map, whole=whole)
    for place in {str(made.device), *made.used} - {"disk"}:
        kind = torch.device(place).type
        if kind not in bnb.supported_torch_devices:
            raise ConfigError(
                f"device_map: bitsandbytes {bnb.__version__} computes nothing on {kind}\n"
                f"place the model on one of {', '.join(sorted(bnb.supported_torch_devices))}"
            )
    return made


def _empty_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device, with its ties."""
    known: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor.detach(), device="meta")
        known[id(tensor)] = (
            nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )
    return copy.deepcopy(model, known)


def usual_device() -> torch.device:
    """Return the current accelerator, or the CPU where bitsandbytes has none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type not in bnb.supported_torch_devices:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def quantised_outline(model: nn.Module, config: Any) -> nn.Module:
    """Return a copy on the meta device, of the size of the quantised model."""
    return _outline(model, config, choose(model, config))


def _outline(model: nn.Module, config: Any, choice: Choice) -> nn.Module:
    small = _empty_copy(model)
    cast(small, config, choice)
    for name in choice.chosen:
        outline(small.get_submodule(name), config)  # type: ignore[arg-type]
    return small
