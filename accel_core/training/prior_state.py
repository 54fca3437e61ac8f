"""Optimizer state from before `prepare`: loaded by the user, or created with the optimizer (Adagrad)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from accel_core.checkpoint.defaults import BaseState
from accel_core.contract.state import TensorTemplate
from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.contract.unit import Unit


def has_state(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has stepped or loaded a state.

    Some optimizers, such as torch's Adagrad, create the state of each parameter in their constructor. In such
    a state `step` is 0; it can be created again.
    """
    return any(_has_stepped(state) for state in optimizer.state.values())


def capture_optimizer_state(unit: Unit, optimizer: Optimizer) -> Callable[[], None]:
    """Copy the state of an optimizer whose models are not wrapped yet; return a function that restores it.

    Call the function after wrapping. If wrapping has replaced, split or moved parameters, the function splits
    and moves their state alike.
    """
    before = {p: (p.shape, p.device) for group in optimizer.param_groups for p in group["params"]}
    state = BaseState().optimizer_state(unit, optimizer)
    template: dict[str, dict[str, TensorTemplate]] = defaultdict(dict)
    for name, leaf in state.leaves.items():
        parameter, _, key = name.rpartition("/")
        dtype = str(leaf.shards[0][1].dtype).removeprefix("torch.")
        template[parameter][key] = TensorTemplate(leaf.kind, leaf.global_shape, dtype, leaf.layout)

    def put_back() -> None:
        now = [p for group in optimizer.param_groups for p in group["params"]]
        if all((p.shape, p.device) == before.get(p) for p in now):
            return
        if reasons := unit.hooks.refuse_optimizer_state(unit, optimizer, template, state.plain):
            raise AccelError(
                f"prepare: the {type(optimizer).__name__} already has state\n" + "\n".join(reasons)
            )
        held: dict[Any, Any] = optimizer.state
        of_no_parameter = {key: value for key, value in held.items() if not isinstance(key, Tensor)}
        held.clear()
        held.update(of_no_parameter)
        unit.hooks.materialize_optimizer_state(unit, optimizer, template, state.plain)
        for name, leaf in unit.hooks.optimizer_state(unit, optimizer).leaves.items():
            whole = state.leaves[name].shards[0][1]
            for offset, part in leaf.shards:
                box = tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
                part.copy_(whole[box])

    return put_back


def _has_stepped(state: Any) -> bool:
    if not isinstance(state, Mapping) or not state:
        return bool(state)
    step = state.get("step", 1)
    return not getattr(step, "is_meta", False) and float(step) != 0
