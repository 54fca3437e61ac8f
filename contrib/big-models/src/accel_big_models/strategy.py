"""Strategy `dispatched`: a model larger than its device in an ordinary run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from attrs import evolve
from torch import nn

from accel_big_models.arranging import arrange
from accel_big_models.config import DispatchedPlugin
from accel_big_models.empty import empty_weights
from accel_big_models.engine import Engine
from accel_big_models.hooks import enters_of
from accel_big_models.planning import place_name, plan, plan_from_map
from accel_big_models.sizes import available
from accel_big_models.tenants import tenants_of
from accel_big_models.weights import persistent_buffers, weights_of
from accel_core import Leaf, hooks, implements, leaf_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_big_models.plans import Plan
    from accel_big_models.tenants import Tenant
    from accel_core import Entry, Run, Unit

__all__ = ["Dispatched"]


class Dispatched:
    """Places a model by its plan, or leaves it as the library has dispatched it.

    Trained weights stay on the device, beside frozen ones of the same block that come and go.
    """

    below: Any

    def __init__(self, config: DispatchedPlugin | None, run: Run) -> None:
        self.config = config or DispatchedPlugin()
        self.run = run

    @implements(hooks.model_init_context)
    def model_init_context(self, unit_name: str | None) -> AbstractContextManager[Any]:
        return empty_weights()

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        if optimizers and self.run.world.size > 1:
            reason = (
                f"strategy 'dispatched' would train a different copy on each of {self.run.world.size} ranks\n"
                "prepare the model without its optimizer, or in one process"
            )
            return [reason]
        untrainable = [(model, self._untrainable(model, optimizers)) for model in models]
        return [
            f"an optimizer holds {names[0]} of the {type(model).__name__}, whose values come and go: a step's"
            " changes would be lost\n"
            "train a part of each block and freeze the rest, as adapters do; or have dispatched.memory or"
            " dispatched.device_map keep it on the device"
            for model, names in untrainable
            if names
        ]

    @implements(hooks.place_model)
    def place_model(self, unit: Unit, model: nn.Module, device: torch.device) -> nn.Module:
        if not enters_of(model):
            made = self._plan(model)
            trained = {id(it) for optimizer in unit.optimizers for it in _parameters(optimizer)}
            tenants = tenants_of(model, made)
            for tenant in tenants:
                if id(tenant.tensor) in trained:
                    tenant.place = place_name(tenant.device)
            arrange(model, made, tenants, self.config.folder, mapped=True)
        return model

    @implements(hooks.model_state)
    def model_state(self, unit: Unit) -> Mapping[str, Leaf]:
        """Return views of host memory and mapped files; what must be read is kept."""
        leaves = {}
        for number, model in enumerate(unit.models):
            for engine in _engines(model):
                engine.hold(unwritten=False)
            for name, tensor in _named(model):
                canonical = unit.qualify(number, name)
                if canonical not in unit.aliases:
                    leaves[canonical] = leaf_of(tensor)
        return leaves

    @implements(hooks.load_state)
    def load_state(self, unit: Unit, entries: Mapping[str, Entry]) -> None:
        """Compute with what was written into the weights' views."""
        for model in unit.models:
            for engine in _engines(model):
                engine.hold(unwritten=True)

    @implements(hooks.iter_weights)
    def iter_weights(
        self, unit: Unit, dtype: torch.dtype | None, to: torch.device | None
    ) -> Iterator[tuple[str, Tensor]]:
        for number, model in enumerate(unit.models):
            for name, tensor in weights_of(model):
                yield unit.qualify(number, name), tensor.to(to, dtype if tensor.is_floating_point() else None)

    @implements(hooks.full_parameters)
    @contextmanager
    def full_parameters(self, unit: Unit, names: Sequence[str], writeback: bool) -> Iterator[None]:
        engines = [engine for model in unit.models for engine in _engines(model)]
        for engine in engines:
            engine.hold(unwritten=False)
        yield
        for engine in engines:
            engine.hold(unwritten=True)

    def _plan(self, model: nn.Module) -> Plan:
        mapped, given, whole = (
            self.config.device_map,
            cast("Any", self.config.memory),
            self.config.whole or None,
        )
        if mapped is not None:
            made = plan_from_map(model, mapped, whole=whole)
        elif given is not None:
            made = plan(model, given, whole=whole)
        else:
            places = dict.fromkeys((self.run.device, "cpu"))
            memory: dict[Any, Any] = {place: self._free(_device(place)) for place in places}
            made = plan(model, {**memory, "disk": "1000TB"}, whole=whole)
        if made.device.type == "cpu":  # no device among its places: blocks are computed where inputs are
            made = evolve(made, device=_device(place_name(self.run.device)))
        return made

    def _free(self, device: torch.device) -> int:
        """Ask the device's plugin, then torch, for the bytes that can be allocated."""
        stats = {} if device.type == "cpu" else self.below.memory_stats(device)
        return stats["free"] if "free" in stats else available(device)

    def _untrainable(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
        """Return trained weights that come and go, unless beside frozen ones."""
        trained = {id(it) for optimizer in optimizers for it in _parameters(optimizer)}
        if not trained:
            return []
        if enters_of(model):
            away = [weight for engine in _engines(model) for weight in engine.weights]
            return [weight.name for weight in away if id(weight.tensor) in trained]
        tenants = [it for it in tenants_of(model, self._plan(model)) if it.is_streamed]
        return [it.names[0] for it in tenants if id(it.tensor) in trained and not _has_frozen(it, trained)]


def _has_frozen(tenant: Tenant, trained: set[int]) -> bool:
    block = tenant.blocks[0]
    parameters = [it for it in block.tensors.values() if isinstance(it, nn.Parameter)]
    return any(id(it) not in trained for it in parameters)


def _device(place: Any) -> torch.device:
    return torch.device(place)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _engines(model: nn.Module) -> list[Engine]:
    engines = {id(enter.engine): enter.engine for enter in enters_of(model)}
    return [engine for engine in engines.values() if engine is not None]


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from persistent_buffers(model)
