"""Plain tensors in `load_state_dict` of sharded models and optimizers: each rank takes its part of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["part_of", "take_plain_state", "take_plain_weights"]


def part_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, as the parameter is sharded.

    Not collective.
    """
    if not isinstance(parameter, DTensor):
        return tensor
    where = tensor.to(parameter.device)
    return distribute_tensor(where, parameter.device_mesh, parameter.placements, src_data_rank=None)


def take_plain_weights(model: nn.Module) -> None:
    """Let `load_state_dict` of the model, and of its parts, take the whole tensors of somebody's file."""
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_cut_weights)


def _cut_weights(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for key, parameter in module._parameters.items():
        if _is_whole(state.get(prefix + key), parameter):
            state[prefix + key] = _apart(state[prefix + key], parameter)


def take_plain_state(optimizer: Optimizer) -> None:
    """Let `load_state_dict` of the optimizer take the state of one that was never sharded."""
    if hasattr(optimizer, "register_load_state_dict_pre_hook"):
        optimizer.register_load_state_dict_pre_hook(_cut_state)


def _cut_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    here = dict(zip(numbers, parameters, strict=False))  # torch compares groups and lengths
    state = {
        number: {
            key: _apart(value, here[number]) if _is_whole(value, here.get(number)) else value
            for key, value in values.items()
        }
        if isinstance(values, Mapping)
        else values
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}


def _apart(tensor: Tensor, parameter: Any) -> Tensor:
    """Return this rank's part in memory of its own: a view would keep all of the tensor."""
    return part_of(tensor.detach(), parameter).clone()


def _is_whole(value: Any, parameter: Any) -> bool:
    """Return whether this is a plain tensor of all of a sharded parameter's elements."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_plain and isinstance(parameter, DTensor) and value.shape == parameter.shape
