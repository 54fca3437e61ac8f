"""Models: weights and buffers by name, ties, and the extra state that modules add to `state_dict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from accel_core.checkpoint.defaults import model_state
from accel_core.checkpoint.extra import extra_state, restore_extra, takers, warn_of_hooks_that_only_save
from accel_core.checkpoint.sections.objects import class_of
from accel_core.checkpoint.tasks import UnitPlan
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.checkpoint.tasks import Restoration, Save
    from accel_core.contract.run import Run
    from accel_core.contract.state import Leaf
    from accel_core.contract.unit import Unit
    from accel_core.storage.state import State
    from accel_core.storage.tensors import Stored

T = TypeVar("T")


def collect(save: Save) -> None:
    """Collect weights and buffers as leaves, and describe the units for the file that ranks share."""
    save.state.shared["units"] = {unit.name: _collect_unit(save.state, unit) for unit in save.run.units}
    save.state.shared["prepared"] = _prepared(save.run)  # for programs that read checkpoints by themselves


def _collect_unit(state: State, unit: Unit) -> dict[str, Any]:
    buffers = {
        unit.names.qualify(number, name)
        for number, model in enumerate(unit.models)
        for name, _ in model.named_buffers(remove_duplicate=False)
    }
    for name, leaf in without_unsaved(unit, unit.hooks.model_state(unit)).items():
        # Replicas of buffers may differ (batch norm's statistics do): the lowest rank's buffers are saved.
        state.add((unit.name, f"model/{name}"), leaf, any_replica_may_write=name not in buffers)
        if name in buffers:
            _refuse_expanded(unit, name, leaf)
    extra = without_unsaved(unit, _extra_states(unit))
    warn_of_hooks_that_only_save(unit, extra)
    return {
        "strategy": unit.strategy,
        "models": len(unit.models),
        "aliases": dict(unit.names.aliases),
        "extra": {
            name: state.encode(value, f"units.{unit.name}.{name} (in its state_dict)")
            for name, value in extra.items()
        },
    }


def without_unsaved(unit: Unit, named: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of `named` without the entries of models in `Run.unsaved_models`."""
    places = filter(None, map(unit.run.prepared.place_of, unit.run.unsaved_models))
    unsaved = [str(number) for owner, number in places if owner is unit]
    if len(unit.wrapped) == 1:
        return {} if unsaved else dict(named)
    return {name: each for name, each in named.items() if name.partition(".")[0] not in unsaved}


def _extra_states(unit: Unit) -> dict[str, Any]:
    """Return the extra state of all models of the unit, by its keys in `state_dict`."""
    return {
        f"{unit.names.qualify(number, '')}{key}": value
        for number in range(len(unit.models))
        for key, value in extra_state(unit, number).items()
    }


def _refuse_expanded(unit: Unit, name: str, leaf: Leaf) -> None:
    """Refuse a buffer whose elements share memory: a load could not write it."""
    for _, tensor in leaf.shards:
        if tensor.numel() > 1 and any(
            not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise CheckpointError(
                f"unit {unit.name!r}: buffer {name} was made by expand, and a load cannot write into memory"
                " that its elements share\nmake it a tensor of its own with clone(), or persistent=False"
            )


def require_known_names(run: Run, state: State) -> None:
    """Raise CheckpointError if a plugin offers other names than the user's model has."""
    for unit in run.units:
        keys = [(key.partition("/"), leaf) for (name, key), leaf in state.leaves.items() if name == unit.name]
        offered = {name: leaf for (sort, _, name), leaf in keys if sort == "model"}
        known = without_unsaved(unit, model_state(unit)).keys()
        # A leaf without shards may belong to a part of the model that only other ranks have.
        if odd := [n for n in sorted(offered.keys() ^ known) if n in known or offered[n].shards]:
            raise CheckpointError(
                f"unit {unit.name!r}: only one of the model and the state that strategy {unit.strategy!r}"
                f" offers has {', '.join(odd[:10])}\n"
                "the plugin must use the names of the user's own model, and offer a leaf for each"
            )


def _prepared(run: Run) -> dict[str, list[tuple[str, int]]]:
    """Return sort -> (unit, number in the unit) of each prepared object, in `prepare`'s order."""
    inside = {id(proxy): proxy.optimizer for _, proxy in run.prepared.optimizers}
    inside |= {id(proxy): proxy.scheduler for _, proxy in run.prepared.schedulers}
    places: dict[str, list[tuple[str, int]]] = {"models": [], "optimizers": [], "schedulers": []}
    units = run.units
    for thing in [inside.get(id(proxy), proxy) for proxy in run.prepared.ordered]:
        for unit in units:
            held: tuple[Sequence[Any], ...] = (unit.wrapped, unit.optimizers, unit.schedulers)
            for found, items in zip(places.values(), held, strict=True):
                found += [(unit.name, number) for number, item in enumerate(items) if item is thing]
    return places


# -- a load ------------------------------------------------------------------------------------------------


def plan(load: Restoration) -> None:
    """Plan to copy weights and to restore extra state; add the units to `load.units` for other sections."""
    saved = _units_of_all_ranks(load)
    load.problems.compare("unit ", saved, [unit.name for unit in load.run.units])
    for unit in load.run.units:
        if unit.name in saved:
            load.units.append(_plan_unit(load, unit, saved[unit.name]))


def _units_of_all_ranks(load: Restoration) -> dict[str, dict[str, Any]]:
    """Return the units as all ranks have described them.

    If two ranks describe the same unit, the earlier rank wins. If two optimizers list a parameter, the later
    one wins.
    """
    parts: list[Mapping[str, Any]] = [load.own, load.checkpoint.state, *load.checkpoint.ranks.values()]
    joined: dict[str, dict[str, Any]] = {}
    for units in [part["units"] for part in reversed(parts) if "units" in part]:
        for name, unit in units.items():
            known = joined.setdefault(name, {"aliases": {}, "extra": {}, "optimizers": []})
            known["schedulers"] = unit["schedulers"]
            known["aliases"].update(unit["aliases"])
            known["extra"].update(unit["extra"])
            others = [other for other in known["optimizers"] if other not in unit["optimizers"]]
            known["optimizers"] = others + unit["optimizers"]
    return joined


def _plan_unit(load: Restoration, unit: Unit, saved: Mapping[str, Any]) -> UnitPlan:
    unit.names.drop_cut_ties()
    for alias, owner in saved["aliases"].items():
        if unit.names.aliases.get(alias, alias) != unit.names.aliases.get(owner, owner):
            untied = f"{alias} was tied to {owner}, and is not tied to it here"
            load.problems.found.append(f"{unit.name}: {untied}")
    tensors = _tensors_by_sort(load, unit)
    leaves = without_unsaved(unit, unit.hooks.model_state(unit))
    misfits = load.plan_copy(f"{unit.name}: model/", leaves, without_unsaved(unit, tensors["model"]))
    _plan_extra(load, unit, without_unsaved(unit, saved["extra"]))
    return UnitPlan(unit, saved, leaves, **tensors, misfits=misfits)


def _tensors_by_sort(load: Restoration, unit: Unit) -> dict[str, dict[str, Stored]]:
    """Return the unit's stored tensors by sort, named as this run names tied weights."""
    tensors: dict[str, dict[str, Stored]] = {"model": {}, "optimizer": {}, "plugins": {}}
    first_keys: dict[tuple[str, str], str] = {}
    for (name, key), stored in load.checkpoint.tensors.items():
        if name != unit.name:
            continue
        sort, _, here = key.partition("/")
        if unit.names.aliases:
            owner, slash, part = here.rpartition("/") if sort == "optimizer" else (here, "", "")
            here = f"{unit.names.aliases.get(owner, owner)}{slash}{part}"
            if (first := first_keys.setdefault((sort, here), key)) != key:
                tied = f"{first} and {key} are one here, by a tie, and were two"
                load.problems.fatal.append(f"{unit.name}: {tied}")
        tensors[sort][here] = stored
    return tensors


def _plan_extra(load: Restoration, unit: Unit, saved: Mapping[str, Any]) -> None:
    """Plan to restore the state that modules add to `state_dict`.

    Saved keys that a module has not made yet are accepted: modules may add keys in their first step.
    """
    present = without_unsaved(unit, _extra_states(unit))
    takeable: list[str] = []
    for number in range(len(unit.models)):
        prefix = unit.names.qualify(number, "")
        keys = {key.removeprefix(prefix): key for key in saved if key.startswith(prefix)}
        for module, names in takers(unit, number, keys).items():
            encoded = {name: saved[keys[key]] for name, key in names.items()}
            here = {name: present[keys[key]] for name, key in names.items() if keys[key] in present}
            takeable += [keys[key] for key in names.values()]
            what = f"extra state of {unit.name}: {', '.join(names.values())} ({class_of(module)})"
            load.plan_call(what, encoded, partial(restore_extra, module, here))
    load.problems.compare(f"{unit.name}: extra state ", saved, [*present, *takeable])
