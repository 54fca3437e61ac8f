"""Restore optimizers by parameter name, and schedulers by position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from attrs import evolve, frozen
from torch import Tensor

from accel_core.checkpoint.collect import NEVER_RESTORED, class_of
from accel_core.checkpoint.own_state import is_same, own_state, restore_own_state
from accel_core.checkpoint.read import fill
from accel_core.contract.state import TensorTemplate
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.checkpoint.problems import Action, Problems
    from accel_core.checkpoint.read import Checkpoint, Stored
    from accel_core.contract.state import Leaf
    from accel_core.contract.unit import Unit

_PER_GROUP: Final = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums"}
)
"""Attributes of torch's schedulers that are lists of one value per group."""


class SavedGroup(NamedTuple):
    """A group of an optimizer, by their numbers in the checkpoint."""

    optimizer: int
    group: int


@frozen
class Saved:
    """The saved optimizer state of one parameter.

    values: its group's. plain: its state that is not a tensor. algorithm: the class that stepped it.
    """

    values: Mapping[str, Any]
    plain: Mapping[str, Any]
    algorithm: str
    group: SavedGroup

    def is_like(self, other: Saved) -> bool:
        """Compare all but the place in groups."""
        return self.algorithm == other.algorithm and is_same(
            [self.values, self.plain], [other.values, other.plain]
        )


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
        # What no optimizer of this run has claimed yet: state by parameter, own state by saved optimizer.
        self._unclaimed = _by_name_here(unit, _saved_parameters(unit, checkpoint, described), problems)
        self._own = {
            number: (
                saved["class"],
                checkpoint.decode(saved["own"], f"units.{unit.name} {saved['class']}.own"),
            )
            for number, saved in enumerate(described)
            if "own" in saved
        }
        self._origins: dict[Optimizer, list[set[SavedGroup]]] = {}

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
        own = self._claim_own(f"{unit.name}: own state of {algorithm}", mine, state.own)
        if own:
            what = f"{unit.name}: own state of {algorithm}"
            self.actions.append((what, partial(restore_own_state, optimizer, own)))
        for number, group in enumerate(state.groups):
            what = f"{unit.name}: group {number} of {algorithm}"
            values = _group_values(what, group, mine, problems)
            self.actions.append((what, partial(_set_group, optimizer, number, values)))
            places = {mine[name].group for name in group["params"] if name in mine}
            self._origins.setdefault(optimizer, []).append(places)
        self._add_state(optimizer, algorithm, mine, state.leaves)
        if own:  # a wrapper's `load_state_dict` may have given what it wraps another state to step with
            self.actions.append((f"{unit.name}: state of {algorithm}", partial(own_state, optimizer)))

    def places(self) -> Iterator[tuple[str, Stored, Leaf | None]]:
        """Yield (parameter, stored tensor, leaf that it fills or None before it is made)."""
        for stored, leaves in self._places:
            for key, each in stored.items():
                yield key.rpartition("/")[0], each, leaves.get(key)

    def note_unclaimed(self, elsewhere: Collection[str]) -> None:
        """Note saved optimizer state that no optimizer has taken, as a problem.

        Call it once all optimizers are added. elsewhere: parameters that other ranks hold.
        """
        name, unused = self._unit.name, [kind for kind, own in self._own.values() if own]
        left = [parameter for parameter in self._unclaimed if parameter not in elsewhere]
        self._problems.compare(f"{name}: optimizer state of ", left, ())
        self._problems.compare(f"{name}: own state of ", unused, ())

    def add_scheduler(self, what: str, scheduler: Any, state: dict[str, Any]) -> None:
        """Fit a scheduler's saved state to the groups of its optimizer.

        The optimizer must be added already.
        """
        self._problems.fatal.extend(_regroup(what, state, self._origins.get(scheduler.optimizer, ())))
        self.actions.append((what, partial(scheduler.load_state_dict, state)))

    def _claim_own(self, what: str, mine: Mapping[str, Saved], here: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the saved state beside parameters, of optimizers that are one here."""
        numbers = sorted({saved.group.optimizer for saved in mine.values()})
        claimed = [self._own.pop(number, ("", {}))[1] for number in numbers]
        if len(claimed) > 1 and any(claimed):
            self._problems.fatal.append(f"{what}: {len(claimed)} optimizers that each have such are one now")
        own: Mapping[str, Any] = next(iter(claimed), {})
        self._problems.compare(f"{what}: ", own.get("rest", ()), here.get("rest", ()))
        return own

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


def _regroup(what: str, state: dict[str, Any], origins: Sequence[Collection[SavedGroup]]) -> Iterator[str]:
    """Fit a scheduler's lists of one value per group to the groups here.

    Yields problems.

    origins: for each group, the saved groups in which its parameters were.
    """
    for key in [key for key in state if key in _PER_GROUP]:
        saved = dict(enumerate(state[key]))
        values = [[saved[n] for _, n in sorted(origin) if n in saved] for origin in origins]
        if any(value != found[0] for found in values for value in found[1:]):
            yield f"{what}: {key} was {state[key]}, and parameters of several of these groups are in one now"
        if values and all(values):
            state[key] = [found[0] for found in values]
    for nested in state.get("_schedulers", ()):
        yield from _regroup(what, nested, origins)


def _saved_parameters(
    unit: Unit, checkpoint: Checkpoint, described: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Saved]]:
    """(name as it was there, what was saved of it)."""
    for number, each in enumerate(described):
        path, algorithm = f"units.{unit.name} {each['class']}", each["class"]
        plain = checkpoint.decode(each["plain"], f"{path}.state")
        for position, group in enumerate(checkpoint.decode(each["groups"], f"{path}.groups")):
            values = {key: group[key] for key in group if key not in ("params", *NEVER_RESTORED)}
            bare = Saved(values, {}, algorithm, SavedGroup(number, position))
            for name in group["params"]:
                yield name, evolve(bare, plain=plain[name]) if name in plain else bare


def _by_name_here(unit: Unit, saved: Iterable[tuple[str, Saved]], problems: Problems) -> dict[str, Saved]:
    """Name as it is here -> what was saved.

    Two that are one here, by a tie, must have been alike.
    """
    found: dict[str, Saved] = {}
    names: dict[str, str] = {}
    for name, each in saved:
        here = unit.aliases.get(name, name)
        known, first = found.setdefault(here, each), names.setdefault(here, name)
        if first != name and not known.is_like(each):
            differ = f"{first} and {name} were stepped differently, and are one here, by a tie"
            problems.found.append(f"{unit.name}: {differ}")
    return found


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
