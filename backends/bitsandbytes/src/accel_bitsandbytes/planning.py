"""Plan of the devices of a model, from the sizes of its quantised weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import bitsandbytes as bnb
import torch
from torch import nn

from accel_big_models import plan, plan_from_map
from accel_bitsandbytes.choosing import Choice, choose
from accel_bitsandbytes.converting import cast, quantise_on_meta
from accel_core import ConfigError

if TYPE_CHECKING:
    from accel_big_models import Plan

__all__ = ["HOST", "DeviceMap", "make_plan", "quantised_outline", "usual_device"]

HOST: Final = ("cpu", "disk")
WORDS: Final = ("auto", "sequential")

DeviceMap = Mapping[str, str | int | torch.device]
"""Name of a module -> its place."""


def make_plan(
    model: nn.Module,
    config: Any,
    choice: Choice,
    device_map: DeviceMap | str | None,
    whole: Sequence[str] | None,
    memory: Any,
) -> Plan:
    """Return the plan of devices for a model, from the sizes of its quantised weights."""
    outline = _outline(model, config, choice)
    if isinstance(device_map, str) and device_map not in WORDS:
        raise ConfigError(
            f"device_map must be one of {', '.join(WORDS)} or a mapping, got {device_map!r}\n"
            "use one of these words; accel-compat supports Accelerate's other words"
        )
    if isinstance(device_map, str):
        result = plan(outline, memory, whole=whole)
    elif device_map is not None and not isinstance(device_map, Mapping):
        raise ConfigError(
            f"device_map must be a word or a mapping, got {device_map!r}\n"
            f"to place the whole model on one device, use {{'': {device_map!r}}}"
        )
    else:
        result = plan_from_map(
            outline, {"": usual_device()} if device_map is None else device_map, whole=whole
        )
    for place in {str(result.device), *result.used} - {"disk"}:
        kind = torch.device(place).type
        if kind not in bnb.supported_torch_devices:
            raise ConfigError(
                f"device_map: bitsandbytes {bnb.__version__} does not support {kind}\n"
                f"place the model on one of {', '.join(sorted(bnb.supported_torch_devices))}"
            )
    return result


def _empty_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device, with its ties."""
    # deepcopy takes objects from its memo instead of copying them, so no tensor is copied.
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor.detach(), device="meta")
        memo[id(tensor)] = (
            nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )
    return copy.deepcopy(model, memo)


def usual_device() -> torch.device:
    """Return the current accelerator, or the CPU if bitsandbytes does not support the accelerator."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type not in bnb.supported_torch_devices:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def quantised_outline(model: nn.Module, config: Any) -> nn.Module:
    """Return a copy of the model on the meta device with the sizes of the quantised model."""
    return _outline(model, config, choose(model, config))


def _outline(model: nn.Module, config: Any, choice: Choice) -> nn.Module:
    outline = _empty_copy(model)
    cast(outline, config, choice)
    for name in choice.chosen:
        quantise_on_meta(outline.get_submodule(name), config)  # type: ignore[arg-type]
    return outline
