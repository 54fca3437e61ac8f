"""FSDP of version 2, for models whose layers are split over ranks.

These ranks may share nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel_core import hooks, implements
from accel_fsdp.sharding.fsdp2 import Sharded, refuse_second_order

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Run, Unit
    from accel_fsdp.config import FullyShardedDataParallelPlugin

__all__ = ["Split"]


class Split(Sharded):
    """Leaves a model that no rank shares as the extension has split it.

    `fully_shard` over a mesh of one rank would cost a tenth of a step. Parameters that no layer splits are
    plain tensors then, the same on all ranks.
    """

    def __init__(self, config: FullyShardedDataParallelPlugin, run: Run) -> None:
        super().__init__(config, run)
        self._split: WeakKeyDictionary[Unit, list[Any]] = WeakKeyDictionary()
        """Parameters of split layers, of models that are left so."""

    def shards(self, model: nn.Module) -> bool:
        config, alone = self.config, self.mesh.size() == 1 and bool(self._replica_groups)
        if not alone or config.cpu_offload or type(config.reshards) is int:
            return True
        # Gradients are whole, and of a whole window, when torch calls hooks of parameters.
        hooked = any(p._post_accumulate_grad_hooks for p in (*model.parameters(), *self._before.values()))
        casts = config.mixed_precision_policy is not None or self.run.config.mixed_precision != "no"
        return hooked or casts

    @implements(hooks.wrap_model)
    def wrap_model(self, unit: Unit, model: nn.Module) -> nn.Module:
        """Shard the model, if another rank shares it. Collective."""
        wrapped = super().wrap_model(unit, model)
        if not any(isinstance(module, FSDPModule) for module in wrapped.modules()):
            split = [parameter for parameter in wrapped.parameters() if isinstance(parameter, DTensor)]
            self._split.setdefault(unit, []).extend(split)
            for module in wrapped.modules():
                if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
                    # torch gives wrong ones between a split layer and a whole one.
                    module.register_forward_hook(refuse_second_order)
        return wrapped

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit: Unit) -> None:
        """Complete the gradients of norms that saw parts of sequences.

        Collective.
        """
        _complete(self._split.get(unit, ()))

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        def completed() -> Any:
            assert closure is not None
            loss = closure()
            _complete(self._split.get(unit, ()))
            return loss

        return super().optimizer_step(unit, optimizer, completed if closure else None)

    def mixes(self, unit: Unit) -> bool:
        return True


@torch.no_grad()
def _complete(parameters: Iterable[Any]) -> None:
    """Lay gradients out as their parameters are. Collective.

    Partial ones are summed, as `fully_shard` does in a backward.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
