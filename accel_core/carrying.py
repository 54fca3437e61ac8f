"""Optimizer state from before `prepare`: torch's Adagrad makes some when it is made, others were loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from accel_core.checkpoint.leaf import TensorTemplate
from accel_core.native.state import BaseState

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.unit import Unit

__all__ = ["carry"]


def carry(unit: Unit, optimizer: Optimizer) -> Callable[[], None]:
    """Note the state of an optimizer whose models are not wrapped yet; call the result once they are.

    Where wrapping has replaced or cut parameters, their state is then cut as they are.
    """
    shapes = {p: p.shape for group in optimizer.param_groups for p in group["params"]}
    state = BaseState().optimizer_state(unit, optimizer)
    template: dict[str, dict[str, TensorTemplate]] = defaultdict(dict)
    for name, leaf in state.leaves.items():
        parameter, _, key = name.rpartition("/")
        dtype = str(leaf.shards[0][1].dtype).removeprefix("torch.")
        template[parameter][key] = TensorTemplate(leaf.kind, leaf.global_shape, dtype, leaf.layout)

    def put_back() -> None:
        now = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p in shapes and p.shape == shapes[p] for p in now):
            return
        optimizer.state.clear()
        unit.hooks.materialize_optimizer_state(unit, optimizer, template, state.plain)
        for name, leaf in unit.hooks.optimizer_state(unit, optimizer).leaves.items():
            whole = state.leaves[name].shards[0][1]
            for offset, part in leaf.shards:
                box = tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
                part.copy_(whole[box])

    return put_back
