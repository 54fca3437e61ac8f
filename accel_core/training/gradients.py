"""The gradient of each parameter as backward computes it, before it is reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from accel_core.errors import ConfigError
from accel_core.plugins.discovery import offering

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from accel_core.contract.unit import Unit


def attach_gradient_transforms(unit: Unit, number: int) -> None:
    """Have backward call hook `transform_gradient` for parameters of a unit's model.

    Does nothing if no plugin has the hook. number: of the model in the unit.

    Raises:
        ConfigError: the unit's strategy does not offer `local_gradients`: the hook would see nothing.
    """
    if unit.steps.transform_gradient is None:
        return
    if "local_gradients" not in unit.offers:
        plugins = " and ".join(one.plugin for one in unit.hooks.implementations("transform_gradient"))
        raise ConfigError(
            f"{plugins} reads gradients before ranks reduce them (hook transform_gradient), and strategy"
            f" {unit.strategy!r} does not have these\nleave {plugins} out; or {offering('local_gradients')}"
        )
    earlier = {id(parameter) for model in unit.models[:number] for parameter in model.parameters()}
    for parameter in unit.models[number].parameters():
        can_train = parameter.is_floating_point() or parameter.is_complex()
        if can_train and id(parameter) not in earlier and not parameter.is_inference():
            unit.detach.append(_register(parameter, _transform(unit, parameter)))


def _transform(unit: Unit, parameter: nn.Parameter) -> Callable[[Tensor], Tensor]:
    parameters = unit.run.prepared.parameters

    def transform(gradient: Tensor) -> Tensor:
        # Looked up in each backward: units may be joined, which gives the parameter another name.
        (owner,) = parameters.units_of([parameter])
        changed: Tensor = owner.steps.transform_gradient(owner, gradient, parameters.name_of(parameter))
        return changed

    return transform


def _register(parameter: nn.Parameter, transform: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    # torch takes hooks of trainable tensors only; a frozen one may be trained later.
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_hook(transform)
    parameter.requires_grad_(not frozen)
    return handle.remove
