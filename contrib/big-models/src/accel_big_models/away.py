"""Modules whose weights are away.

Their state dicts are whole. Conversions that would be lost are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from accel_big_models.engine import Weight
from accel_core import AccelError

__all__ = ["guard", "release"]

_APPLY: Final = "_apply"
"""The method behind `to`, `half`, `cuda` and the like of a module and all in it."""


def guard(model: nn.Module, weights: Mapping[int, Weight], device: torch.device) -> None:
    """Have modules know of weights that come and go.

    weights: `id` of each tensor -> weight. device: where they are computed.
    """
    for module in model.modules():
        own = {
            name: weights[id(tensor)] for name, tensor in module._parameters.items() if id(tensor) in weights
        }
        if own:
            module.register_state_dict_post_hook(_Values(own))
        if own or module is model:
            checked = list(weights.values()) if module is model else list(own.values())
            vars(module)[_APPLY] = _Apply(module, own, checked, device)


def release(module: nn.Module) -> None:
    """Undo `guard` for one module."""
    hooks = module._state_dict_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Values)]:
        del hooks[key]
    if isinstance(vars(module).get(_APPLY), _Apply):
        del vars(module)[_APPLY]


class _Values:
    """Puts values into a module's state dict for weights that are not in memory."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self.weights = weights

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, weight in self.weights.items():
            # A copy of the module that stands for its names only has other tensors.
            if f"{prefix}{name}" in state and module._parameters.get(name) is weight.tensor:
                state[f"{prefix}{name}"] = weight.whole()


class _Apply:
    """`module._apply` that leaves out weights that come and go.

    own: the module's. checked: a conversion of one of these would be lost at the next forward.
    """

    def __init__(
        self, module: nn.Module, own: Mapping[str, Weight], checked: list[Weight], device: torch.device
    ) -> None:
        self.module, self.own, self.checked, self.device = module, own, checked, device

    def __call__(self, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for weight in self.checked:
            before = torch.empty(0, dtype=weight.source.dtype, device=self.device)
            after = convert(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise AccelError(
                    f"{weight.name} comes and goes: in the next forward it would be {before.dtype} on"
                    f" {before.device} again, not {after.dtype} on {after.device}\n"
                    "give plan(dtype=) or the plan's places, or take the offloading off first:"
                    " accel_big_models.undo(model)"
                )
        parameters = dict(self.module._parameters)
        for name in self.own:
            del self.module._parameters[name]
        try:
            type(self.module)._apply(self.module, convert, recurse)
        finally:
            parameters.update(
                {name: self.module._parameters.get(name, parameters[name]) for name in parameters}
            )
            self.module._parameters.clear()
            self.module._parameters.update(parameters)
        return self.module
