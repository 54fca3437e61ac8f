"""The tensors of a model, each once, and their places by a plan."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor, nn

from accel_big_models.blocks import Block, blocks_named
from accel_big_models.plans import HOST, Plan
from accel_big_models.sources import Source
from accel_core import ConfigError, is_out_of_memory

__all__ = ["Tenant", "tenants_of"]


@define(eq=False)
class Tenant:
    """A tensor of the model, under all its names, and its place.

    device: where it is computed. place: where it lies. source: its values in a file, if it has any there.
    """

    tensor: Tensor
    names: list[str]
    device: torch.device
    place: str
    source: Source | None = None
    blocks: list[Block] = field(factory=list)

    @property
    def is_buffer(self) -> bool:
        """True for buffers: a forward may write to them, so they do not come and go."""
        return not isinstance(self.tensor, nn.Parameter)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which it is computed."""
        return self.tensor.dtype if self.source is None else self.source.dtype

    @property
    def is_streamed(self) -> bool:
        """True if it comes and goes: its values cannot be computed with where they lie."""
        if self.is_buffer or self.place not in HOST:
            return False
        if self.device.type != "cpu":
            return True
        return self.place == "disk" and (self.source is None or self.source.tensor() is None)


def tenants_of(model: nn.Module, plan: Plan) -> list[Tenant]:
    """Return the model's tensors with their places, each once.

    Raises:
        ConfigError: the plan has no place for one, parts that share one are on two devices, or this process
            has no such device.
    """
    tenants: dict[int, Tenant] = {}
    for block in blocks_named(model, {part.name for part in plan.places}):
        for name, tensor in block.tensors.items():
            try:
                place = plan.place_of(name)
            except KeyError:
                raise ConfigError(
                    f"the plan has no place for {name} of the {type(model).__name__}\n"
                    "make the plan of this model"
                ) from None
            device = plan.device if place in HOST else torch.device(place)
            tenant = tenants.setdefault(id(tensor), Tenant(tensor, [], device, place))
            if tenant.device != device:
                raise ConfigError(
                    f"{tenant.names[0]} and {name} are one tensor, and the plan computes them on"
                    f" {tenant.device} and {device}\nplace them on the same device"
                )
            tenant.names.append(name)
            tenant.blocks.append(block)
    for device in {tenant.device for tenant in tenants.values()}:
        _require(device)
    return list(tenants.values())


def _require(device: torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the plan has parts on {device}, which cannot be used here: {str(error).partition(chr(10))[0]}\n"
            "name devices that this process sees, 'cpu' or 'disk'"
        ) from error
