"""Optimizers from a checkpoint: hyperparameters and state by parameter name, schedulers by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import Tensor

from accel_core.checkpoint.collect import NEVER_RESTORED, class_of
from accel_core.checkpoint.leaf import TensorTemplate
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.checkpoint.leaf import OptimizerState
    from accel_core.checkpoint.problems import Problems
    from accel_core.checkpoint.read import Checkpoint, Stored
    from accel_core.unit import Unit

__all__ = ["SavedParameter", "load_scheduler", "restore_optimizer", "saved_parameters"]

Action = Callable[[], object]


@frozen(eq=False)
class SavedParameter:
    """What a checkpoint says of one parameter: its optimizer's class, group values, other plain state."""

    optimizer: str
    values: Mapping[str, Any]
    plain: Mapping[str, Any]


def saved_parameters(
    checkpoint: Checkpoint, unit: Unit, shared: Sequence[Mapping[str, Any]]
) -> dict[str, SavedParameter]:
    """Parameter name, as it is here -> what the checkpoint says of it; all ranks' descriptions merged."""
    found: dict[str, SavedParameter] = {}
    partly = [own["optimizers"].get(unit.name, ()) for own in checkpoint.ranks if "optimizers" in own]
    for section in (shared, *partly):
        for each in section:
            path = f"units.{unit.name} {each['class']}"
            plain = checkpoint.decode(each["plain"], f"{path}.state")
            for group in checkpoint.decode(each["groups"], f"{path}.groups"):
                values = {key: group[key] for key in group if key not in ("params", *NEVER_RESTORED)}
                for name in group["params"]:
                    saved = SavedParameter(each["class"], values, plain.get(name, {}))
                    found[unit.aliases.get(name, name)] = saved
    return found


def restore_optimizer(
    unit: Unit,
    optimizer: Optimizer,
    state: OptimizerState,
    saved: Mapping[str, SavedParameter],
    tensors: Mapping[str, Stored],
    problems: Problems,
) -> list[Action]:
    """What to do to bring the optimizer into the saved state. Changes nothing yet.

    state: what the optimizer has now. tensors: `NAME/KEY` -> stored tensor.
    """
    names = {name for group in state.groups for name in group["params"]}
    saved = {name: saved[name] for name in names if name in saved}  # the unit may have other optimizers
    problems.compare(f"{unit.name}: {class_of(optimizer)} of ", saved, names)
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number, (group, described) in enumerate(zip(optimizer.param_groups, state.groups, strict=True)):
        what = f"{unit.name}: group {number} of {class_of(optimizer)}"
        groups.append((group, _group_values(what, described, saved, problems)))
    mine = {key: stored for key, stored in tensors.items() if key.rpartition("/")[0] in names}
    _check_tensors(unit, state, mine, problems)
    return [
        partial(_set_groups, groups),
        partial(_fill_state, unit, optimizer, mine),
        partial(_set_plain, unit, optimizer, saved),
    ]


def load_scheduler(scheduler: Any, state: dict[str, Any], *, regrouped: bool) -> None:
    """Load a scheduler's state; the optimizers' groups have theirs already.

    regrouped: the groups are not those that were saved, so lists of one value a group are made anew.
    """
    if regrouped:
        _regroup(state, scheduler.optimizer.param_groups)
    scheduler.load_state_dict(state)


def _group_values(
    what: str, described: Mapping[str, Any], saved: Mapping[str, SavedParameter], problems: Problems
) -> dict[str, Any]:
    """The hyperparameters on which all saved parameters of the group agree."""
    agreed: dict[str, tuple[str, Any]] = {}
    seen: set[int] = set()
    for name in described["params"]:
        if name not in saved or id(saved[name].values) in seen:
            continue
        seen.add(id(saved[name].values))
        for key, value in saved[name].values.items():
            if key not in described:
                problems.unexpected(f"{what} knows no {key!r}, which {saved[name].optimizer} had for {name}")
                continue
            first, agreed_value = agreed.setdefault(key, (name, value))
            if not _equal(value, agreed_value):
                values = f"{first} had {agreed_value!r}, {name} had {value!r}"
                problems.fatal.append(f"{what}: {key}: {values}, and both are in one group now")
    return {key: value for key, (_, value) in agreed.items()}


def _check_tensors(
    unit: Unit, state: OptimizerState, tensors: Mapping[str, Stored], problems: Problems
) -> None:
    weights = unit.hooks.model_state(unit)
    for key, stored in tensors.items():
        what, name = f"{unit.name}: optimizer/{key}", key.rpartition("/")[0]
        if stored.kind == "opaque":  # no template describes it: it must be there, in this very layout
            if key not in state.leaves or state.leaves[key].layout != stored.layout:
                problems.fatal.append(f"{what} has layout {stored.layout}, which is not known here")
        elif stored.kind == "like_param" and name in weights and weights[name].global_shape != stored.shape:
            there, here = list(stored.shape), list(weights[name].global_shape)
            problems.fatal.append(f"{what} has shape {there} in the checkpoint, the parameter {here} here")


def _fill_state(unit: Unit, optimizer: Optimizer, tensors: Mapping[str, Stored]) -> None:
    template: dict[str, dict[str, TensorTemplate]] = {}
    for key, stored in tensors.items():
        name, _, part = key.rpartition("/")
        template.setdefault(name, {})[part] = TensorTemplate(stored.kind, stored.shape, stored.dtype)
    unit.hooks.materialize_optimizer_state(unit, optimizer, template)
    leaves = unit.hooks.optimizer_state(unit, optimizer).leaves
    for key, stored in tensors.items():
        if key not in leaves:
            raise CheckpointError(
                f"unit {unit.name!r}: strategy {unit.strategy!r} made no place for optimizer/{key}\n"
                "its materialize_optimizer_state must offer what the template asks for"
            )
        stored.fill(leaves[key])


def _set_groups(groups: Sequence[tuple[dict[str, Any], Mapping[str, Any]]]) -> None:
    for group, values in groups:
        for key, value in values.items():
            if isinstance(group[key], Tensor):
                group[key].copy_(value if isinstance(value, Tensor) else group[key].new_tensor(value))
            else:
                group[key] = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _set_plain(unit: Unit, optimizer: Optimizer, saved: Mapping[str, SavedParameter]) -> None:
    for name, parameter in unit.named_parameters().items():
        plain = saved[name].plain if name in saved else {}
        state = optimizer.state.get(parameter, {})
        for key in [
            key for key, value in state.items() if not isinstance(value, Tensor) and key not in plain
        ]:
            del state[key]
        if plain:
            optimizer.state[parameter].update(unit.hooks.move(dict(plain), parameter.device, False))


def _regroup(state: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    if "base_lrs" in state:
        state["base_lrs"] = [group["initial_lr"] for group in groups]
    if "_last_lr" in state:
        state["_last_lr"] = [group["lr"] for group in groups]
    for nested in state.get("_schedulers", ()):
        _regroup(nested, groups)


def _equal(one: Any, other: Any) -> bool:
    same = one == other
    return bool(same.all()) if isinstance(same, Tensor) else bool(same)
