"""State of a unit that plugins keep: entries that the hook `save_state` returns and `load_state` restores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from accel_core.contract.state import Entry, Leaf

if TYPE_CHECKING:
    from accel_core.checkpoint.tasks import Restoration, Save, UnitPlan
    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit

Scope = Literal["replicated", "per_reader", "per_rank"]
Sources = Mapping[Scope, Sequence[Mapping[str, Any]]]
"""Scope -> the states of ranks to take entries from. Scopes that cannot be restored here are absent."""


def collect(save: Save) -> None:
    """Collect the plugins' entries: tensors become leaves, other values go into this rank's file."""
    save.state.own["plugins"] = {unit.name: _collect_unit(save, unit) for unit in save.run.units}


def _collect_unit(save: Save, unit: Unit) -> dict[str, dict[str, dict[str, Any]]]:
    """Add the unit's tensors; return scope -> plugin -> the plugin's entries that are not tensors."""
    plain: dict[str, dict[str, dict[str, Any]]] = {}
    for plugin, entries_of in unit.hooks.implementations("save_state"):
        for name, entry in (entries_of(unit) or {}).items():
            key = "plugins/" + _key(unit.run, plugin, name, entry, alone=save.alone)
            if isinstance(entry.value, Leaf):
                save.state.add((unit.name, key), entry.value)
            else:
                replicated = entry.scope != "per_rank"
                value = save.state.encode(entry.value, f"{unit.name}.{key}", replicated=replicated)
                plain.setdefault(entry.scope, {}).setdefault(plugin, {})[name] = value
    return plain


def _key(run: Run, plugin: str, name: str, entry: Entry, *, alone: bool = False) -> str:
    """Return the key of a plugin's entry, with the rank or reader to which it belongs."""
    reader, rank = (0, 0) if alone else (run.topology.reader, run.world.rank)
    owner = {"per_reader": f"@reader{reader}", "per_rank": f"@rank{rank}"}
    return f"{plugin}/{name}{owner.get(entry.scope, '')}"


def plan(load: Restoration) -> None:
    """Plan to copy tensors into the plugins' leaves, and to call `load_state` with the plugins' entries."""
    sources = _sources(load)
    for each in load.units:
        _plan_unit(load, each, sources)


def _sources(load: Restoration) -> Sources:
    """Return scope -> states to take entries from. Earlier ranks win; pipeline stages have other entries."""
    ranks, topology = [*load.checkpoint.ranks.values()], load.run.topology
    sources: dict[Scope, Sequence[Mapping[str, Any]]] = {"replicated": ranks}
    if load.checkpoint.manifest.world["readers"] == topology.readers:
        same_reader = [state for state in ranks if state["reader"] == topology.reader]
        if not same_reader:
            raise load.checkpoint.lacks(f"what belongs to reader {topology.reader}")
        sources["per_reader"] = same_reader[:1]
    if load.is_same_world:
        sources["per_rank"] = [load.own]
    elif load.run.world.rank == 0:
        units = [unit for state in ranks for unit in state["plugins"].values()]
        lost = {name for unit in units for scope in unit.keys() - sources for name in unit[scope]}
        if lost:
            what = f"each rank's own state of {', '.join(sorted(lost))} is left out"
            load.problems.warn(f"the world has changed: {what}")
    return sources


def _plan_unit(load: Restoration, each: UnitPlan, sources: Sources) -> None:
    """Plan the entries of one unit.

    Entries of a plugin that is not in this stack are left out, and a plugin that has no entries in the
    checkpoint starts anew: both cases are logged, and are not errors.
    """
    unit = each.unit
    taken: dict[str, dict[str, Entry]] = {}
    leaves: dict[str, Leaf] = {}
    saving, begins_anew = {key.partition("/")[0] for key in each.plugins}, set[str]()
    for plugin, name, entry in _tensors_here(unit, sources):
        if plugin in saving:
            leaves[key := _key(load.run, plugin, name, entry)] = entry.value
            if key in each.plugins:
                taken.setdefault(plugin, {})[name] = entry
        else:
            begins_anew.add(plugin)
    for plugin in sorted(begins_anew):
        load.problems.warn(f"{unit.name}: it has no state of plugin {plugin}, which begins anew")
    stored = {key: each.plugins[key] for key in leaves if key in each.plugins}
    for key in sorted(load.plan_copy(f"{unit.name}: plugins/", leaves, stored)):
        load.problems.fatal.append(f"{unit.name}: {key} belongs to a plugin, and is taken whole")
    for scope, plugin, encoded in _plain_entries(unit, sources):
        entries = taken.setdefault(plugin, {})
        for name in encoded.keys() - entries.keys():
            value = load.checkpoint.decode(encoded[name], f"units.{unit.name}.{plugin}.{name}")
            entries[name] = Entry(value=value, scope=scope)
    _give_back(load, unit, taken)


def _tensors_here(unit: Unit, sources: Sources) -> Iterator[tuple[str, str, Entry]]:
    """Yield (plugin, name, entry) of each tensor that a plugin of this run would save."""
    for plugin, entries_of in unit.hooks.implementations("save_state"):
        for name, entry in (entries_of(unit) or {}).items():
            if isinstance(entry.value, Leaf) and entry.scope in sources:
                yield plugin, name, entry


def _plain_entries(unit: Unit, sources: Sources) -> Iterator[tuple[Scope, str, Mapping[str, Any]]]:
    """Yield (scope, plugin, name -> encoded value) from each rank in `sources`."""
    for scope, states in sources.items():
        for state in states:
            for plugin, encoded in state["plugins"][unit.name].get(scope, {}).items():
                yield scope, plugin, encoded


def _give_back(load: Restoration, unit: Unit, taken: Mapping[str, Mapping[str, Entry]]) -> None:
    """Plan to call each plugin's `load_state`, also without entries; warn of entries that no plugin takes."""
    loading = unit.hooks.implementations("load_state")
    for plugin, take in loading:
        what = f"{unit.name}: state of plugin {plugin}"
        load.copies.append((what, partial(take, unit, taken.get(plugin, {}))))
    for plugin in sorted(taken.keys() - {each.plugin for each in loading}):
        if not all(isinstance(entry.value, Leaf) for entry in taken[plugin].values()):
            why = "which is not in this stack, or has no hook load_state"
            load.problems.warn(f"{unit.name}: state of plugin {plugin}, {why}, is left out")
