"""Restore optimizers by parameter name, and schedulers by position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from accel_core.checkpoint.collect import NEVER_RESTORED, class_of
from accel_core.checkpoint.wrapped_state import of_this_rank
from accel_core.contract.state import TensorTemplate
from accel_core.errors import CheckpointError
from accel_core.storage.codec import is_same
from accel_core.storage.tensors import fill

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.checkpoint.problems import Action, Problems
    from accel_core.contract.state import Leaf
    from accel_core.contract.unit import Unit
    from accel_core.storage.tensors import Checkpoint, Stored


@frozen
class Saved:
    """The saved optimizer state of one parameter.

    values: its group's. plain: its state that is not a tensor. algorithm: the class that stepped it. group:
    the numbers of its optimizer and group in the checkpoint.
    """

    values: Mapping[str, Any]
    plain: Mapping[str, Any]
    algorithm: str
    group: tuple[int, int]


class OptimizerPlan:
    """Comparison of a unit's optimizers and schedulers with the saved ones.

    `actions` restores them, in order. Making a plan changes nothing: each misfit is noted in `problems`, and
    the caller raises.

    described: the saved optimizers. tensors: `NAME/KEY` -> stored tensor. misfits: the parameters that do
    not fit, whose state is left out.
    """

    def __init__(
        self,
        unit: Unit,
        checkpoint: Checkpoint,
        described: Sequence[Mapping[str, Any]],
        tensors: Mapping[str, Stored],
        misfits: Collection[str],
        problems: Problems,
    ) -> None:
        self.actions: list[Action] = []
        self._places: list[tuple[Mapping[str, Stored], Mapping[str, Leaf]]] = []
        self._unit, self._tensors, self._misfits, self._problems = unit, tensors, misfits, problems
        self._unclaimed = {  # what no optimizer of this run has claimed yet
            unit.aliases.get(name, name): saved
            for name, saved in _saved_parameters(unit, checkpoint, described)
        }
        self._regrouped: set[Optimizer] = set()
        """Optimizers whose parameters are in groups of other numbers than in the checkpoint."""

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Claim what was saved of the optimizer's parameters."""
        unit, problems = self._unit, self._problems
        state = unit.hooks.optimizer_state(unit, optimizer)
        algorithm = state.algorithm or class_of(optimizer)
        names = [name for group in state.groups for name in group["params"]]
        mine = {name: self._unclaimed.pop(name) for name in names if name in self._unclaimed}
        problems.compare(f"{unit.name}: {algorithm} of ", mine, names)
        for name in [name for name in mine if mine[name].algorithm != algorithm]:
            stepped = f"was stepped by {mine.pop(name).algorithm}, here by {algorithm}, another class"
            problems.found.append(f"{unit.name}: {name} {stepped}")
        for number, group in enumerate(state.groups):
            what = f"{unit.name}: group {number} of {algorithm}"
            values = _group_values(what, group, mine, problems)
            self.actions.append((what, partial(_set_group, optimizer, number, values)))
            if any(mine[name].group[1] != number for name in group["params"] if name in mine):
                self._regrouped.add(optimizer)
        self._add_state(optimizer, algorithm, mine, state.leaves)

    def places(self) -> Iterator[tuple[str, Stored, Leaf | None]]:
        """Yield (parameter, stored tensor, leaf that it fills or None before it is made)."""
        for stored, leaves in self._places:
            for key, each in stored.items():
                yield key.rpartition("/")[0], each, leaves.get(key)

    def note_unclaimed(self, elsewhere: Collection[str]) -> None:
        """Note saved optimizer state that no optimizer has taken, as a problem.

        Call it once all optimizers are added. elsewhere: parameters that other ranks hold.
        """
        left = [parameter for parameter in self._unclaimed if parameter not in elsewhere]
        self._problems.compare(f"{self._unit.name}: optimizer state of ", left, ())

    def add_scheduler(self, what: str, scheduler: Any, state: dict[str, Any]) -> None:
        """Plan to restore a scheduler, whose optimizer must be added already.

        Its state has values of each group, by number.
        """
        if scheduler.optimizer in self._regrouped:
            self._problems.fatal.append(
                f"{what}: its optimizer has other groups, or has them in another order"
            )
        self.actions.append((what, partial(scheduler.load_state_dict, state)))

    def _add_state(
        self, optimizer: Optimizer, algorithm: str, mine: Mapping[str, Saved], leaves: Mapping[str, Leaf]
    ) -> None:
        unit, problems, what = self._unit, self._problems, f"{self._unit.name}: state of {algorithm}"
        fit = {name: saved for name, saved in mine.items() if name not in self._misfits}
        if not problems.strict and (odd := sorted(mine.keys() - fit.keys())):
            problems.warn(f"{unit.name}: {algorithm} begins anew with {', '.join(odd)}, which do not fit")
        plain = {name: saved.plain for name, saved in fit.items() if saved.plain}
        stored: dict[str, Stored] = {}
        template: dict[str, dict[str, TensorTemplate]] = defaultdict(dict)
        alike: dict[Any, TensorTemplate] = {}
        for key, each in self._tensors.items():
            name, _, part = key.rpartition("/")
            if name in fit:
                stored[key] = each
                outline = each.kind, each.shape, each.dtype, each.layout
                made = alike.get(outline)
                if made is None:
                    made = TensorTemplate(*outline, each.number)
                    if each.kind != "scalar":  # which has a number of its own
                        alike[outline] = made
                template[name][part] = made
        self._places.append((stored, leaves))
        reasons = unit.hooks.refuse_optimizer_state(unit, optimizer, template, plain)
        problems.fatal.extend(f"{what}: {reason}" for reason in reasons)
        self.actions.append((what, partial(_fill_state, unit, optimizer, stored, template, plain)))


def _saved_parameters(
    unit: Unit, checkpoint: Checkpoint, described: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Saved]]:
    """(name as it was there, what was saved of it)."""
    for number, each in enumerate(described):
        path, algorithm = f"units.{unit.name} {each['class']}", each["class"]
        plain = checkpoint.decode(each["plain"], f"{path}.state")
        for position, group in enumerate(checkpoint.decode(each["groups"], f"{path}.groups")):
            values = {key: group[key] for key in group if key not in ("params", *NEVER_RESTORED)}
            bare = Saved(values, {}, algorithm, (number, position))
            for name in group["params"]:
                yield name, evolve(bare, plain=plain[name]) if name in plain else bare


def _group_values(
    what: str, has: Mapping[str, Any], saved: Mapping[str, Saved], problems: Problems
) -> dict[str, Any]:
    """Return the hyperparameters on which all saved parameters of the group agree."""
    agreed: dict[str, tuple[str, Any]] = {}
    one_of_each = {saved[name].group: name for name in reversed(has["params"]) if name in saved}
    for name in reversed(one_of_each.values()):
        for key, value in saved[name].values.items():
            first, agreed_value = agreed.setdefault(key, (name, value))
            if not is_same(value, agreed_value):
                values = f"{first} had {agreed_value!r}, {name} had {value!r}"
                problems.fatal.append(f"{what}: {key}: {values}, and both are in one group now")
    known = {"params", *NEVER_RESTORED, *agreed}
    for key in [key for key in has if key not in known] if agreed else ():
        problems.warn(f"{what}: {key} is not in the checkpoint, it stays {has[key]!r}")
    # A key that the group lacks is one that the optimizer makes in its first step.
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
