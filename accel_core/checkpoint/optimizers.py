"""Optimizers from a checkpoint: hyperparameters and state by parameter name, schedulers by position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from torch import Tensor

from accel_core.checkpoint.collect import NEVER_RESTORED, class_of
from accel_core.checkpoint.own_state import own_state, restore_own_state
from accel_core.checkpoint.read import fill
from accel_core.contract.state import TensorTemplate
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.checkpoint.problems import Problems
    from accel_core.checkpoint.read import Checkpoint, Stored
    from accel_core.contract.unit import Unit

__all__ = ["restore_optimizers"]


_PER_GROUP: Final = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums"}
)
"""What torch's schedulers keep a value a group of."""


@frozen
class Saved:
    """What was saved of one parameter: its group's values, its state that is no tensor, who stepped it.

    group: (number of its optimizer, number of its group there).
    """

    values: Mapping[str, Any]
    plain: Mapping[str, Any]
    algorithm: str
    group: tuple[int, int]

    def is_like(self, other: Saved) -> bool:
        """Whether all but the place in groups is the same."""
        pairs = ((self.values, other.values), (self.plain, other.plain))
        return self.algorithm == other.algorithm and all(
            one.keys() == two.keys() and all(torch.as_tensor(one[key] == two[key]).all() for key in one)
            for one, two in pairs
        )


def restore_optimizers(
    unit: Unit,
    checkpoint: Checkpoint,
    described: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, Stored],
    elsewhere: Collection[str],
    misfits: Collection[str],
    problems: Problems,
    schedulers: Iterable[tuple[str, Any, Any]],
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What to do to bring the unit's optimizers and schedulers into the saved state. Changes nothing yet.

    described: the saved optimizers. tensors: `NAME/KEY` -> stored tensor. elsewhere: the parameters that
    only other ranks hold. misfits: those that do not fit, whose state is left out. schedulers: each in
    words, itself, and its state.
    """
    left = _by_name_here(unit, _saved_parameters(unit, checkpoint, described), problems)
    owns = {
        number: checkpoint.decode(each["own"], f"units.{unit.name} {each['class']}.own")
        for number, each in enumerate(described)
        if "own" in each
    }
    origins: dict[Optimizer, list[set[tuple[int, int]]]] = {}
    for optimizer in unit.optimizers:
        state = unit.hooks.optimizer_state(unit, optimizer)
        algorithm = state.algorithm or class_of(optimizer)
        names = [name for group in state.groups for name in group["params"]]
        mine = {name: left.pop(name) for name in names if name in left}
        problems.compare(f"{unit.name}: {algorithm} of ", mine, names)
        for name in [name for name in mine if mine[name].algorithm != algorithm]:
            found = f"was stepped by {mine.pop(name).algorithm}, here by {algorithm}, another class"
            problems.found.append(f"{unit.name}: {name} {found}")
        what = f"{unit.name}: own state of {algorithm}"
        own = _own(
            what, [owns.pop(n, {}) for n in sorted({each.group[0] for each in mine.values()})], problems
        )
        problems.compare(f"{what}: ", own.get("rest", ()), state.own.get("rest", ()))
        if own:
            yield what, partial(restore_own_state, optimizer, own)
        for number, has in enumerate(state.groups):
            what = f"{unit.name}: group {number} of {algorithm}"
            yield what, partial(_set_group, optimizer, number, _group_values(what, has, mine, problems))
            groups = {mine[name].group for name in has["params"] if name in mine}
            origins.setdefault(optimizer, []).append(groups)
        fit = {name: each for name, each in mine.items() if name not in misfits}
        if not problems.strict and (odd := sorted(mine.keys() - fit.keys())):
            problems.warn(f"{unit.name}: {algorithm} begins anew with {', '.join(odd)}, which do not fit")
        stored = {key: tensor for key, tensor in tensors.items() if key.rpartition("/")[0] in fit}
        plain = {name: each.plain for name, each in fit.items() if each.plain}
        template = _template(stored)
        what = f"{unit.name}: state of {algorithm}"
        reasons = unit.hooks.refuse_optimizer_state(unit, optimizer, template, plain)
        problems.fatal.extend(f"{what}: {reason}" for reason in reasons)
        yield what, partial(_fill_state, unit, optimizer, stored, template, plain)
        if own:  # a wrapper's `load_state_dict` may have given what it wraps another state to step with
            yield what, partial(own_state, optimizer)
    problems.compare(f"{unit.name}: optimizer state of ", left.keys() - elsewhere, ())
    unused = [f"{described[number]['class']}" for number, own in owns.items() if own]
    problems.compare(f"{unit.name}: own state of ", unused, ())
    for what, scheduler, state in schedulers:
        problems.fatal.extend(_regroup(what, state, origins.get(scheduler.optimizer, ())))
        yield what, partial(scheduler.load_state_dict, state)


def _regroup(what: str, state: dict[str, Any], origins: Sequence[set[tuple[int, int]]]) -> Iterator[str]:
    """Fit a scheduler's lists of one value a group to the groups that there are now; tell what cannot be.

    origins: for each group, the saved groups in which its parameters were.
    """
    for key in _PER_GROUP & state.keys():
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
            for name in group["params"]:
                saved = Saved(values, plain.get(name, {}), algorithm, (number, position))
                yield name, saved


def _by_name_here(unit: Unit, saved: Iterable[tuple[str, Saved]], problems: Problems) -> dict[str, Saved]:
    """Name as it is here -> what was saved; two that are one here, by a tie, must have been alike."""
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
    """The hyperparameters on which all saved parameters of the group agree."""
    agreed: dict[str, tuple[str, Any]] = {}
    one_of_each = {saved[name].group: name for name in reversed(has["params"]) if name in saved}
    for name in reversed(one_of_each.values()):
        for key, value in saved[name].values.items():
            first, agreed_value = agreed.setdefault(key, (name, value))
            if not torch.as_tensor(value == agreed_value, device="cpu").all():
                values = f"{first} had {agreed_value!r}, {name} had {value!r}"
                problems.fatal.append(f"{what}: {key}: {values}, and both are in one group now")
    for key in has.keys() - agreed.keys() - {"params", *NEVER_RESTORED} if agreed else ():
        problems.warn(f"{what}: {key} is not in the checkpoint, it stays {has[key]!r}")
    # A key that the group lacks is one that the optimizer makes in its first step.
    return {key: value for key, (_, value) in agreed.items()}


def _own(what: str, saved: Sequence[Mapping[str, Any]], problems: Problems) -> Mapping[str, Any]:
    """What belongs to no parameter, of the saved optimizers whose parameters are in one here."""
    if len(saved) > 1 and any(saved):
        problems.fatal.append(f"{what}: {len(saved)} optimizers that each have such are one now")
    return next(iter(saved), {})


def _set_group(optimizer: Optimizer, number: int, values: Mapping[str, Any]) -> None:
    group = optimizer.param_groups[number]
    for key, value in values.items():
        if isinstance(group.get(key), Tensor):
            group[key].copy_(torch.as_tensor(value))
        else:
            group[key] = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _template(tensors: Mapping[str, Stored]) -> dict[str, dict[str, TensorTemplate]]:
    template: dict[str, dict[str, TensorTemplate]] = defaultdict(dict)
    for key, stored in tensors.items():
        name, _, part = key.rpartition("/")
        template[name][part] = TensorTemplate(
            stored.kind, stored.shape, stored.dtype, stored.layout, stored.number
        )
    return template


def _fill_state(
    unit: Unit,
    optimizer: Optimizer,
    tensors: Mapping[str, Stored],
    template: Mapping[str, Mapping[str, TensorTemplate]],
    plain: Mapping[str, Mapping[str, Any]],
) -> None:
    unit.hooks.materialize_optimizer_state(unit, optimizer, template, plain)
    leaves = unit.hooks.optimizer_state(unit, optimizer).leaves if tensors else {}
    places = []
    for key, stored in tensors.items():
        leaf = leaves.get(key)
        if leaf is None or (leaf.global_shape, leaf.layout) != (stored.shape, stored.layout):
            layout = f" of layout {stored.layout}" if stored.layout else ""
            raise CheckpointError(
                f"unit {unit.name!r}: strategy {unit.strategy!r} made no place for optimizer/{key},"
                f" {stored.dtype} {list(stored.shape)}{layout}\n"
                "its materialize_optimizer_state must offer what the template asks for"
            )
        places.append((stored, leaf))
    fill(places)
