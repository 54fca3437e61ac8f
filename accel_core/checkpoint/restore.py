"""From a checkpoint to a run's state: first what is to be done, and whether it fits; then doing it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from accel_core.checkpoint.codec import bytes_of
from accel_core.checkpoint.collect import class_of, entry_key, modules_with_extra_state
from accel_core.checkpoint.leaf import Entry, Leaf
from accel_core.checkpoint.optimizers import load_scheduler, restore_optimizer, saved_parameters
from accel_core.checkpoint.problems import Problems

if TYPE_CHECKING:
    from accel_core.checkpoint.read import Checkpoint, Stored
    from accel_core.run import Run
    from accel_core.unit import Unit

__all__ = ["Restoration", "derived_seed"]

logger = logging.getLogger(__name__)

Scope = Literal["replicated", "per_reader", "per_rank"]


class Restoration:
    """The actions that bring a run into a checkpoint's state. Making one changes nothing.

    Raises:
        CheckpointError: the checkpoint does not fit the run.
    """

    def __init__(self, run: Run, checkpoint: Checkpoint, *, strict: bool) -> None:
        self.run, self.checkpoint = run, checkpoint
        self._problems = Problems(checkpoint.folder, strict)
        self._actions: list[Callable[[], object]] = []
        world = checkpoint.manifest.world
        self._same_readers = world["readers"] == run.topology.readers
        self._same_world = self._same_readers and world["size"] == run.world.size
        self._own = checkpoint.ranks[run.world.rank if self._same_world else 0]
        self._loaders()
        self._units()
        self._registered()
        self._random()
        self._problems.settle()

    def apply(self) -> None:
        """Do it."""
        with torch.no_grad():
            for action in self._actions:
                action()
        if self.run.world.run_id is None:
            self.run.run_id = self.checkpoint.manifest.run_id  # no launcher named this run: it goes on

    def _loaders(self) -> None:
        # First: a loader may refuse its position, and then nothing else has been touched.
        saved = self.checkpoint.decode(self._own["loaders"], "loaders")
        self._problems.compare("dataloader ", _numbers(saved), _numbers(self.run.loaders))
        for loader, position in zip(self.run.loaders, saved, strict=False):
            self._actions.append(partial(loader.load_state_dict, position))

    def _units(self) -> None:
        saved = self.checkpoint.state["units"]
        self._problems.compare("unit ", saved, [unit.name for unit in self.run.units])
        for unit in self.run.units:
            if unit.name in saved:
                self._unit(unit, saved[unit.name])

    def _unit(self, unit: Unit, saved: Mapping[str, Any]) -> None:
        for alias, owner in saved["aliases"].items():
            if unit.aliases.get(alias, alias) != unit.aliases.get(owner, owner):
                found = f"{alias} was tied to {owner}, and is not tied to it here"
                self._problems.fatal.append(f"{unit.name}: {found}")
        tensors = self._tensors(unit)
        self._model(unit, tensors["model"])
        self._extra_state(unit, saved["extra"])
        self._optimizers(unit, saved, tensors["optimizer"])
        self._actions.append(partial(unit.hooks.state_loaded, unit))
        self._plugins(unit, saved["plugins"], tensors["plugins"])

    def _tensors(self, unit: Unit) -> dict[str, dict[str, Stored]]:
        """The unit's stored tensors by sort, named as this run names tied weights."""
        found: dict[str, dict[str, Stored]] = {"model": {}, "optimizer": {}, "plugins": {}}
        for (name, key), stored in self.checkpoint.tensors.items():
            if name == unit.name:
                sort, _, rest = key.partition("/")
                owner, slash, part = rest.rpartition("/") if sort == "optimizer" else (rest, "", "")
                found[sort][f"{unit.aliases.get(owner, owner)}{slash}{part}"] = stored
        return found

    def _model(self, unit: Unit, saved: Mapping[str, Stored]) -> None:
        leaves: Mapping[str, Leaf] = unit.hooks.model_state(unit)
        self._problems.compare(f"{unit.name}: model/", saved, leaves)
        for name in leaves.keys() & saved.keys():
            self._fill(f"{unit.name}: model/{name}", leaves[name], saved[name])

    def _fill(self, what: str, leaf: Leaf, stored: Stored) -> None:
        if self._problems.tensor_fits(what, leaf, stored):
            self._actions.append(partial(stored.fill, leaf))

    def _extra_state(self, unit: Unit, saved: Mapping[str, Any]) -> None:
        modules = modules_with_extra_state(unit)
        self._problems.compare(f"{unit.name}: extra state of ", saved, modules)
        for name in saved.keys() & modules.keys():
            value = self.checkpoint.decode(saved[name], f"units.{unit.name}.{name}")
            self._actions.append(partial(modules[name].set_extra_state, value))

    def _optimizers(self, unit: Unit, saved: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
        parameters = saved_parameters(self.checkpoint, unit, saved["optimizers"])
        states = [unit.hooks.optimizer_state(unit, optimizer) for optimizer in unit.optimizers]
        groups = [group["params"] for state in states for group in state.groups]
        known = {name for group in groups for name in group}
        self._problems.compare(f"{unit.name}: optimizer state of ", parameters, parameters.keys() & known)
        for optimizer, state in zip(unit.optimizers, states, strict=True):
            self._actions += restore_optimizer(unit, optimizer, state, parameters, tensors, self._problems)
        regrouped = groups != [group["params"] for each in saved["optimizers"] for group in each["groups"]]
        load = partial(load_scheduler, regrouped=regrouped)
        for scheduler, state in self._paired(
            f"{unit.name}: scheduler ", saved["schedulers"], unit.schedulers
        ):
            self._actions.append(partial(load, scheduler, state))

    def _paired(self, what: str, saved: Sequence[Any], here: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        for item, state in self._problems.paired(what, saved, here):
            yield item, self.checkpoint.decode(state, f"{what}{class_of(item)}")

    def _plugins(self, unit: Unit, saved: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
        """Plugins' own entries. One that is not in this stack cannot take them back: logged, no error."""
        given: dict[str, dict[str, Entry]] = {}
        for each in unit.hooks.implementations("save_state"):
            given[each.plugin] = self._filled(unit, each.plugin, each.call(unit) or {}, tensors)
        for plugin, scope, entries in self._plain_entries(unit, saved):
            for name, value in entries.items():
                decoded = self.checkpoint.decode(value, f"units.{unit.name}.{plugin}.{name}")
                given.setdefault(plugin, {})[name] = Entry(value=decoded, scope=scope)
        loading = {each.plugin: each.call for each in unit.hooks.implementations("load_state")}
        for plugin, entries_of_plugin in given.items():
            if plugin in loading and entries_of_plugin:
                self._actions.append(partial(loading[plugin], unit, entries_of_plugin))
            elif entries_of_plugin:
                self._warn(f"{unit.name}: state of plugin {plugin}, which is not in this stack, is left out")

    def _filled(
        self, unit: Unit, plugin: str, entries: Mapping[str, Entry], tensors: Mapping[str, Stored]
    ) -> dict[str, Entry]:
        """The plugin's tensor entries that the checkpoint has; they are copied into where they live."""
        found = {}
        for name, entry in entries.items():
            if isinstance(entry.value, Leaf) and self._means_something(unit, plugin, entry.scope):
                key = entry_key(self.run, plugin, name, entry).removeprefix("plugins/")
                if key in tensors:
                    self._fill(f"{unit.name}: plugins/{key}", entry.value, tensors[key])
                    found[name] = entry
                else:
                    self._problems.missing(f"{unit.name}: plugins/{key}")
        return found

    def _plain_entries(
        self, unit: Unit, saved: Mapping[str, Any]
    ) -> Iterator[tuple[str, Scope, Mapping[str, Any]]]:
        for plugin, entries in saved.items():
            yield plugin, "replicated", entries
        reader = self.run.topology.reader
        same_reader = next((own for own in self.checkpoint.ranks if own["reader"] == reader), {})
        own_of: dict[Scope, Mapping[str, Any]] = {"per_reader": same_reader, "per_rank": self._own}
        for scope, own in own_of.items():
            for plugin, entries in own.get(scope, {}).get(unit.name, {}).items():
                if self._means_something(unit, plugin, scope):
                    yield plugin, scope, entries

    def _means_something(self, unit: Unit, plugin: str, scope: Scope) -> bool:
        """Whether entries of this scope can be taken over at this number of ranks and readers."""
        if {"replicated": True, "per_reader": self._same_readers, "per_rank": self._same_world}[scope]:
            return True
        self._warn(f"{unit.name}: {scope} state of plugin {plugin} is left out, the world has changed")
        return False

    def _registered(self) -> None:
        saved = self.checkpoint.state["registered"]
        for item, state in self._paired("registered object ", saved, self.run.registered):
            self._actions.append(partial(item.load_state_dict, state))

    def _random(self) -> None:
        streams: dict[str, Tensor] = self.checkpoint.decode(self._own["random"], "random")
        if self._same_world and streams.keys() == self.run.hooks.rng_state().keys():
            self._actions.append(partial(self.run.hooks.set_rng_state, streams))
            return
        first = self.checkpoint.decode(self.checkpoint.ranks[0]["random"], "random")
        seed = derived_seed(first, self.run.topology.reader)
        self._warn(f"the world or device has changed: random streams start anew, from seed {seed}")
        self._actions.append(partial(self.run.hooks.seed, seed, self.run.topology))

    def _warn(self, what: str) -> None:
        logger.warning("%s: %s", self.checkpoint.folder, what)


def derived_seed(streams: Mapping[str, Tensor], reader: int) -> int:
    """The seed of a reader in another world than the checkpoint's, from rank 0's random streams there."""
    content = b"".join(bytes(bytes_of(streams[name])) for name in sorted(streams))
    return xxh3_64_intdigest(content + reader.to_bytes(8, "big")) % (1 << 32)


def _numbers(items: Sequence[Any]) -> list[str]:
    return [str(number) for number in range(len(items))]
