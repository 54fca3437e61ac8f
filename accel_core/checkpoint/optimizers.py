"""Optimizers from a checkpoint: hyperparameters and state by parameter name, schedulers by position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_core.checkpoint.collect import NEVER_RESTORED, class_of
from accel_core.checkpoint.leaf import TensorTemplate
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.checkpoint.load import Problems
    from accel_core.checkpoint.read import Checkpoint, Stored
    from accel_core.unit import Unit

__all__ = ["restore_optimizers"]


Saved = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Parameter name, as it is here -> the values of its group, and its own state that is no tensor."""


def restore_optimizers(
    unit: Unit,
    checkpoint: Checkpoint,
    described: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, Stored],
    problems: Problems,
    schedulers: Iterable[tuple[Any, Any]],
) -> Iterator[Callable[[], object]]:
    """What to do to bring the unit's optimizers and schedulers into the saved state. Changes nothing yet.

    described: the saved optimizers. tensors: `NAME/KEY` -> stored tensor. schedulers: each with its state.
    """
    left, groups = dict(_saved_parameters(unit, checkpoint, described)), []
    for optimizer in unit.optimizers:
        state = unit.hooks.optimizer_state(unit, optimizer)
        names = [name for group in state.groups for name in group["params"]]
        mine = {name: left.pop(name) for name in names if name in left}
        problems.compare(f"{unit.name}: {class_of(optimizer)} of ", mine, names)
        for number, (group, has) in enumerate(zip(optimizer.param_groups, state.groups, strict=True)):
            what = f"{unit.name}: group {number} of {class_of(optimizer)}"
            groups.append(has["params"])
            yield partial(_set_group, group, _group_values(what, has, mine, problems))
        stored = {key: tensor for key, tensor in tensors.items() if key.rpartition("/")[0] in mine}
        for key, tensor in stored.items():
            if tensor.layout != getattr(state.leaves.get(key), "layout", None):
                foreign = f"has layout {tensor.layout}, which is not known here"
                problems.fatal.append(f"{unit.name}: optimizer/{key} {foreign}")
        yield partial(_fill_state, unit, optimizer, stored, mine)
    problems.compare(f"{unit.name}: optimizer state of ", left, ())
    regrouped = groups != [group["params"] for each in described for group in each["groups"]]
    for scheduler, positions in schedulers:
        yield partial(_load_scheduler, scheduler, positions, regrouped=regrouped)


def _load_scheduler(scheduler: Any, state: dict[str, Any], *, regrouped: bool) -> None:
    """Load a scheduler's state; the optimizers' groups have theirs already.

    regrouped: the groups are not those that were saved, so lists of one value a group are made anew.
    """
    nested = [state] if regrouped else []
    for each in nested:
        for key, value in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
            if key in each:
                each[key] = [group[value] for group in scheduler.optimizer.param_groups]
        nested += each.get("_schedulers", ())
    scheduler.load_state_dict(state)


def _saved_parameters(unit: Unit, checkpoint: Checkpoint, described: Sequence[Mapping[str, Any]]) -> Saved:
    found = {}
    for each in described:
        path = f"units.{unit.name} {each['class']}"
        plain = checkpoint.decode(each["plain"], f"{path}.state")
        for group in checkpoint.decode(each["groups"], f"{path}.groups"):
            values = {key: group[key] for key in group if key not in ("params", *NEVER_RESTORED)}
            found.update({unit.aliases.get(n, n): (values, plain.get(n, {})) for n in group["params"]})
    return found


def _group_values(what: str, has: Mapping[str, Any], saved: Saved, problems: Problems) -> dict[str, Any]:
    """The hyperparameters on which all saved parameters of the group agree."""
    agreed: dict[str, tuple[str, Any]] = {}
    one_of_each = {id(saved[name][0]): name for name in reversed(has["params"]) if name in saved}
    for name in reversed(one_of_each.values()):
        for key, value in saved[name][0].items():
            first, agreed_value = agreed.setdefault(key, (name, value))
            if not torch.as_tensor(value == agreed_value).all():
                values = f"{first} had {agreed_value!r}, {name} had {value!r}"
                problems.fatal.append(f"{what}: {key}: {values}, and both are in one group now")
    problems.compare(f"{what}: ", agreed, agreed.keys() & has.keys())
    return {key: value for key, (_, value) in agreed.items() if key in has}


def _set_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(group[key], Tensor):
            group[key].copy_(torch.as_tensor(value))
        else:
            group[key] = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _fill_state(unit: Unit, optimizer: Optimizer, tensors: Mapping[str, Stored], saved: Saved) -> None:
    template: dict[str, dict[str, TensorTemplate]] = defaultdict(dict)
    for key, stored in tensors.items():
        name, _, part = key.rpartition("/")
        template[name][part] = TensorTemplate(stored.kind, stored.shape, stored.dtype)
    unit.hooks.materialize_optimizer_state(unit, optimizer, template)
    leaves = unit.hooks.optimizer_state(unit, optimizer).leaves
    for key, stored in tensors.items():
        if key not in leaves:
            raise CheckpointError(
                f"unit {unit.name!r}: strategy {unit.strategy!r} made no place for optimizer/{key}\n"
                "its materialize_optimizer_state must offer what the template asks for"
            )
        stored.fill(leaves[key])
    for name, parameter in unit.named_parameters().items():
        _, plain = saved.get(name, ({}, {}))
        state = optimizer.state.get(parameter, {})
        for key in [key for key in state if not isinstance(state[key], Tensor) and key not in plain]:
            del state[key]
        if plain:
            optimizer.state[parameter].update(unit.hooks.move(dict(plain), parameter.device, False))
