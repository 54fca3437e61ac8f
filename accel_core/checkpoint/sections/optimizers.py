"""Optimizers by parameter name, their schedulers by position, and the steps that they have done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accel_core.checkpoint.sections.objects import class_of, encode_objects, pairs
from accel_core.checkpoint.wrapped_state import of_this_rank
from accel_core.contract.state import TensorTemplate
from accel_core.errors import CheckpointError
from accel_core.storage.codec import is_same
from accel_core.storage.tensors import fill

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.checkpoint.problems import Problems
    from accel_core.checkpoint.tasks import Restoration, Save, UnitPlan
    from accel_core.contract.state import Leaf
    from accel_core.contract.unit import Unit
    from accel_core.storage.state import State
    from accel_core.storage.tensors import Stored

NEVER_RESTORED = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that select an implementation of the step, and do not change its result."""


def collect(save: Save) -> None:
    """Collect tensors as leaves, and groups and schedulers into the units that `models` described."""
    for unit in save.run.units:
        described, listed = save.state.shared["units"][unit.name], set[str]()
        described["optimizers"] = [_collect(save.state, unit, each, listed) for each in unit.optimizers]
        described["schedulers"] = encode_objects(save.state, unit.schedulers, f"units.{unit.name}.schedulers")
    save.state.shared["steps_done"] = [proxy.steps_done for _, proxy in save.run.prepared.optimizers]


def _collect(collected: State, unit: Unit, optimizer: Optimizer, listed: set[str]) -> dict[str, Any]:
    """Describe an optimizer, and collect its tensors.

    Args:
        collected: the state of this rank.
        unit: the optimizer's unit.
        optimizer: the optimizer.
        listed: names of the parameters of earlier optimizers; the parameters of `optimizer` are added.
    """
    state = unit.hooks.optimizer_state(unit, optimizer)
    mine = {name for group in state.groups for name in group["params"]}
    if twice := sorted(listed & mine):
        raise CheckpointError(
            f"unit {unit.name!r}: {', '.join(twice[:5])} would be stored of two optimizers, and loaded into"
            " one\ngive a parameter to one optimizer only"
        )
    listed |= mine
    for name, leaf in state.leaves.items():
        collected.add((unit.name, f"optimizer/{name}"), leaf)
    path = f"units.{unit.name} {class_of(optimizer)}"
    groups = [{key: group[key] for key in group if key not in NEVER_RESTORED} for group in state.groups]
    plain = {name: dict(values) for name, values in state.plain.items()}
    return {
        "class": state.algorithm or class_of(optimizer),
        "groups": collected.encode(groups, f"{path}.groups"),
        "plain": collected.encode(plain, f"{path}.state"),
    }


# -- a load ------------------------------------------------------------------------------------------------


class _SavedParameter(NamedTuple):
    """The saved optimizer state of one parameter."""

    hyperparameters: Mapping[str, Any]
    """Hyperparameters of the parameter's group."""
    plain: Mapping[str, Any]
    """Values of the parameter's state that are not tensors."""
    algorithm: str
    """Class name of the optimizer that stepped the parameter."""
    group: tuple[int, int]
    """Numbers of the parameter's optimizer and group in the checkpoint."""


def plan(load: Restoration) -> None:
    """Plan to restore the optimizers and schedulers of each unit, and the counts of their steps."""
    for each in load.units:
        _UnitOptimizers(load, each).plan()
    steps = load.checkpoint.state.get("steps_done", ())
    for (_, proxy), done in zip(load.run.prepared.optimizers, steps, strict=False):
        load.copies.append(("steps done", partial(setattr, proxy, "steps_done", done)))


class _UnitOptimizers:
    """Compares one unit's optimizers and schedulers with the saved ones."""

    def __init__(self, load: Restoration, of_unit: UnitPlan) -> None:
        self.load, self.problems, self.of_unit, self.unit = load, load.problems, of_unit, of_unit.unit
        aliases = self.unit.names.aliases
        self.unclaimed = {aliases.get(name, name): saved for name, saved in _saved_parameters(load, of_unit)}
        """Saved parameters that no optimizer of this run has claimed yet."""
        self.regrouped: set[Optimizer] = set()
        """Optimizers with parameters whose group has another number in the checkpoint."""

    def plan(self) -> None:
        """Plan to restore optimizers and then their schedulers, and to restart the unit's windows."""
        load, unit, saved = self.load, self.unit, self.of_unit.saved
        schedulers = [*pairs(self.problems, f"{unit.name}: scheduler ", saved["schedulers"], unit.schedulers)]
        for optimizer in unit.optimizers:
            self.plan_optimizer(optimizer)
        elsewhere = {name for name, leaf in self.of_unit.leaves.items() if not leaf.shards}
        left = [parameter for parameter in self.unclaimed if parameter not in elsewhere]
        self.problems.compare(f"{unit.name}: optimizer state of ", left, ())
        for what, scheduler, encoded in schedulers:
            proxy = load.run.prepared.proxy_of(scheduler.optimizer)  # of either form that it was made with
            if proxy is not None and proxy.optimizer in self.regrouped:  # it has a value per group, by number
                regrouped = "its optimizer has other groups, or has them in another order"
                self.problems.fatal.append(f"{what}: {regrouped}")
            state = load.checkpoint.decode(encoded, what)
            load.copies.append((what, partial(scheduler.load_state_dict, state)))
        load.copies.append((unit.name, unit.begin_anew))

    def plan_optimizer(self, optimizer: Optimizer) -> None:
        """Claim the saved parameters of an optimizer, and plan to restore its groups and its tensors."""
        unit, problems = self.unit, self.problems
        state = unit.hooks.optimizer_state(unit, optimizer)
        algorithm = state.algorithm or class_of(optimizer)
        names = [name for group in state.groups for name in group["params"]]
        mine = {name: self.unclaimed.pop(name) for name in names if name in self.unclaimed}
        problems.compare(f"{unit.name}: {algorithm} of ", mine, names)
        for name in [name for name in mine if mine[name].algorithm != algorithm]:
            stepped = f"was stepped by {mine.pop(name).algorithm}, here by {algorithm}, another class"
            problems.found.append(f"{unit.name}: {name} {stepped}")
        for number, group in enumerate(state.groups):
            what = f"{unit.name}: group {number} of {algorithm}"
            values = _hyperparameters(what, group, mine, problems)
            self.load.copies.append((what, partial(_set_group, optimizer, number, values)))
            if any(mine[name].group[1] != number for name in group["params"] if name in mine):
                self.regrouped.add(optimizer)
        self.plan_tensors(optimizer, algorithm, mine, state.leaves)

    def plan_tensors(
        self,
        optimizer: Optimizer,
        algorithm: str,
        mine: Mapping[str, _SavedParameter],
        leaves: Mapping[str, Leaf],
    ) -> None:
        """Plan to allocate the parameters' state as in the checkpoint, and to copy the stored tensors."""
        unit, problems, what = self.unit, self.problems, f"{self.unit.name}: state of {algorithm}"
        fit = {name: saved for name, saved in mine.items() if name not in self.of_unit.misfits}
        if not problems.strict and (odd := sorted(mine.keys() - fit.keys())):
            problems.warn(f"{unit.name}: {algorithm} begins anew with {', '.join(odd)}, which do not fit")
        plain = {name: saved.plain for name, saved in fit.items() if saved.plain}
        stored: dict[str, Stored] = {}
        template: dict[str, dict[str, TensorTemplate]] = defaultdict(dict)
        for key, each in self.of_unit.optimizer.items():
            name, _, part = key.rpartition("/")
            if name in fit:
                stored[key] = each
                template[name][part] = TensorTemplate(
                    each.kind, each.shape, each.dtype, each.layout, each.number
                )
        self.load.reads.append(partial(_reads, stored, leaves, self.of_unit.leaves))
        reasons = unit.hooks.refuse_optimizer_state(unit, optimizer, template, plain)
        problems.fatal.extend(f"{what}: {reason}" for reason in reasons)
        self.load.copies.append((what, partial(_fill_state, unit, optimizer, stored, template, plain)))


def _saved_parameters(load: Restoration, each: UnitPlan) -> Iterator[tuple[str, _SavedParameter]]:
    """Yield (name in the checkpoint, saved state) of each parameter of the unit's optimizers."""
    for number, saved in enumerate(each.saved["optimizers"]):
        path, algorithm = f"units.{each.unit.name} {saved['class']}", saved["class"]
        plain = load.checkpoint.decode(saved["plain"], f"{path}.state")
        for position, group in enumerate(load.checkpoint.decode(saved["groups"], f"{path}.groups")):
            values = {key: group[key] for key in group if key not in ("params", *NEVER_RESTORED)}
            bare = _SavedParameter(values, {}, algorithm, (number, position))
            for name in group["params"]:
                yield name, bare._replace(plain=plain[name]) if name in plain else bare


def _reads(
    stored: Mapping[str, Stored], leaves: Mapping[str, Leaf], parameters: Mapping[str, Leaf]
) -> Iterator[tuple[Stored, Leaf | None]]:
    """Yield each stored tensor with the leaf that it fills, or None if the whole tensor may be read."""
    for key, each in stored.items():
        # State that is not allocated yet will be split like its parameter.
        leaf = leaves.get(key) or parameters.get(key.rpartition("/")[0])
        alike = leaf and (leaf.global_shape, leaf.layout) == (each.shape, each.layout)
        yield each, leaf if alike else None


def _hyperparameters(
    what: str, has: Mapping[str, Any], saved: Mapping[str, _SavedParameter], problems: Problems
) -> dict[str, Any]:
    """Return the hyperparameters on which all saved parameters of the group agree."""
    agreed: dict[str, tuple[str, Any]] = {}
    one_of_each = {saved[name].group: name for name in reversed(has["params"]) if name in saved}
    for name in reversed(one_of_each.values()):
        for key, value in saved[name].hyperparameters.items():
            first, agreed_value = agreed.setdefault(key, (name, value))
            if not is_same(value, agreed_value):
                values = f"{first} had {agreed_value!r}, {name} had {value!r}"
                problems.fatal.append(f"{what}: {key}: {values}, and both are in one group now")
    known = {"params", *NEVER_RESTORED, *agreed}
    for key in [key for key in has if key not in known] if agreed else ():
        problems.warn(f"{what}: {key} is not in the checkpoint, it stays {has[key]!r}")
    # Keys that the group does not have are restored too: some optimizers add keys in their first step.
    return {key: value for key, (_, value) in agreed.items()}


def _set_group(optimizer: Optimizer, number: int, values: Mapping[str, Any]) -> None:
    group = optimizer.param_groups[number]
    for key, value in values.items():
        if isinstance(group.get(key), Tensor):
            group[key].copy_(torch.as_tensor(value))
        else:
            group[key] = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _fill_state(
    unit: Unit,
    optimizer: Optimizer,
    tensors: Mapping[str, Stored],
    template: Mapping[str, Mapping[str, TensorTemplate]],
    plain: Mapping[str, Mapping[str, Any]],
) -> None:
    unit.hooks.materialize_optimizer_state(unit, optimizer, template, plain)
    leaves = dict(unit.hooks.optimizer_state(unit, optimizer).leaves.items()) if tensors else {}
    tensors = of_this_rank(tensors, leaves) if tensors.keys() - leaves.keys() else tensors
    for key, stored in tensors.items():
        leaf = leaves.get(key)
        if leaf is None or leaf.global_shape != stored.shape or leaf.layout != stored.layout:
            layout = f" of layout {stored.layout}" if stored.layout else ""
            raise CheckpointError(
                f"unit {unit.name!r}: strategy {unit.strategy!r} did not allocate optimizer/{key},"
                f" {stored.dtype} {list(stored.shape)}{layout}\n"
                "its materialize_optimizer_state must offer what the template asks for"
            )
    fill((stored, leaves[key]) for key, stored in tensors.items())
