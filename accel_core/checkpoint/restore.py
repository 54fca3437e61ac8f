"""Compare a checkpoint with a run, then change the run's state in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from accel_core.checkpoint.collect import class_of, entry_key, extra_states, without_apart
from accel_core.checkpoint.extra import restore_extra, takers
from accel_core.checkpoint.optimizers import OptimizerPlan
from accel_core.checkpoint.problems import Action, Problems
from accel_core.checkpoint.random_state import plan_random
from accel_core.checkpoint.saved_units import join_units, tensors_by_sort
from accel_core.contract.state import Entry, Leaf
from accel_core.errors import CheckpointError
from accel_core.storage.tensors import Checkpoint, fill
from accel_core.storage.wrapped import put_together

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit
    from accel_core.storage.opened import Block
    from accel_core.storage.tensors import Stored

Scope = Literal["replicated", "per_reader", "per_rank"]


class Restoration:
    """The actions that bring a run into a checkpoint's state.

    Making one changes nothing.

    Raises:
        MisfitError: the checkpoint does not fit the run.
    """

    def __init__(self, run: Run, checkpoint: Checkpoint, *, strict: bool) -> None:
        self.run, self.checkpoint = run, checkpoint
        self._problems = Problems(checkpoint.place, strict)
        # By what they restore. First what other people's code does, which may fail; then what core copies.
        self._objects: list[Action] = []
        self._copies: list[Action] = []
        self._places: list[tuple[Stored, Leaf]] = []
        self._optimizer_places: list[tuple[OptimizerPlan, Mapping[str, Leaf]]] = []
        world, reader, ranks = checkpoint.manifest.world, run.topology.reader, checkpoint.ranks
        same_readers = world["readers"] == run.topology.readers
        same_world = (world["readers"], world["size"]) == (run.topology.readers, run.world.size)
        self._own = checkpoint.rank_state(run.world.rank if same_world else 0)
        # Scope of plugins' entries -> the ranks to take them from, where they mean something in this world:
        # each from the first that has it, for pipeline stages have different ones.
        self._scopes: dict[Scope, Sequence[Any]] = {"replicated": [*ranks.values()]}
        if same_readers:
            same = [state for state in ranks.values() if state["reader"] == reader]
            if not same:
                raise checkpoint.lacks(f"what belongs to reader {reader}")
            self._scopes["per_reader"] = same[:1]
        if same_world:
            self._scopes["per_rank"] = [self._own]
        elif run.world.rank == 0:
            self._tell_of_lost([*ranks.values()])
        with self._understood("dataloaders"):
            self._loaders()
        registered = self._pair("registered object ", checkpoint.state["registered"], run.registered)
        for what, item, state in registered:
            value = put_together(checkpoint.decode(state, what), cache(item.state_dict), what)
            self._objects.append((what, partial(item.load_state_dict, value)))
        self.extra: dict[str, Any] = {}
        """Values of the caller's own; `apply` fills them in."""
        self._give("extra", checkpoint.state.get("extra", {}), self.extra.update)
        self._run_state(checkpoint.state.get("run", {}))
        parts: list[Mapping[str, Any]] = [self._own, checkpoint.state, *ranks.values()]
        saved = join_units([part["units"] for part in parts if "units" in part])
        self._problems.compare("unit ", saved, [unit.name for unit in run.units])
        for unit in run.units:
            if unit.name in saved:
                self._unit(unit, saved[unit.name])
        steps = zip(run.prepared.optimizers, checkpoint.state.get("steps_done", ()), strict=False)
        self._copies += [
            ("steps done", partial(setattr, each, "steps_done", done)) for (_, each), done in steps
        ]
        with self._understood("random streams"):
            random = plan_random(run, checkpoint, self._own["random"], self._problems, same_world=same_world)
            self._copies += random
        self._problems.raise_if_any()

    def _tell_of_lost(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Warn of plugins' state that means nothing in this world."""
        units = [unit for state in ranks for unit in state["plugins"].values()]
        lost = {name for unit in units for scope in unit.keys() - self._scopes for name in unit[scope]}
        if lost:
            what = f"each rank's own state of {', '.join(sorted(lost))} is left out"
            self._problems.warn(f"the world has changed: {what}")

    def apply(self) -> None:
        """Make all changes.

        Raises:
            CheckpointError: an action failed; it says which, and what it leaves behind.
        """
        actions = [*self._objects, *self._copies]
        with torch.inference_mode(False), torch.no_grad():  # what is made here is trained on
            for done, (what, action) in enumerate(actions):
                try:
                    action()
                except Exception as error:  # other people's code, of any kind: the message says where
                    before = list(dict.fromkeys(name for name, _ in actions[:done]))
                    raise _mixed(self.checkpoint.place, what, before, error) from error

    def blocks(self) -> set[Block]:
        """Return the blocks that `apply` reads: values of objects are read already."""
        places: list[tuple[Stored, Leaf | None]] = [*self._places]
        for plan, leaves in self._optimizer_places:
            for name, stored, made in plan.places():
                leaf = made or leaves.get(name)  # what is not made yet will be split as its parameter is
                alike = leaf and (leaf.global_shape, leaf.layout) == (stored.shape, stored.layout)
                places.append((stored, leaf if alike else None))
        return self.checkpoint.blocks_of(places)

    def _give(self, what: str, encoded: Any, take: Callable[[Any], object]) -> None:
        """Plan to give the decoded value to `take`. What cannot be decoded raises now."""
        self._objects.append((what, partial(take, self.checkpoint.decode(encoded, what))))

    def _run_state(self, saved: Mapping[str, Any]) -> None:
        """Plugins' state of the whole run, as `_plugins` takes that of a unit."""
        for name, encoded in saved.items():
            what = f"state of plugin {name}"
            load = getattr(self.run.plugins.get(name), "load_state_dict", None)
            if load is not None:
                self._give(what, encoded, load)
            else:
                self._problems.warn(f"{what}, which is not in this stack, is left out")

    def _unit(self, unit: Unit, saved: Mapping[str, Any]) -> None:
        unit.names.drop_cut_ties()
        for alias, owner in saved["aliases"].items():
            if unit.aliases.get(alias, alias) != unit.aliases.get(owner, owner):
                untied = f"{alias} was tied to {owner}, and is not tied to it here"
                self._problems.found.append(f"{unit.name}: {untied}")
        tensors = tensors_by_sort(unit, self.checkpoint, self._problems)
        leaves = without_apart(unit, unit.hooks.model_state(unit))
        misfits = self._fill(f"{unit.name}: model/", leaves, without_apart(unit, tensors["model"]))
        self._extra(unit, without_apart(unit, saved["extra"]))
        schedulers = self._pair(f"{unit.name}: scheduler ", saved["schedulers"], unit.schedulers)
        plan = OptimizerPlan(
            unit, self.checkpoint, saved["optimizers"], tensors["optimizer"], misfits, self._problems
        )
        for optimizer in unit.optimizers:
            plan.add_optimizer(optimizer)
        plan.note_unclaimed({name for name, leaf in leaves.items() if not leaf.shards})
        for what, scheduler, state in schedulers:
            plan.add_scheduler(what, scheduler, self.checkpoint.decode(state, what))
        self._copies += plan.actions
        self._optimizer_places.append((plan, leaves))
        self._copies.append((f"{unit.name}", unit.begin_anew))
        self._plugins(unit, tensors["plugins"])

    def _extra(self, unit: Unit, saved: Mapping[str, Any]) -> None:
        """Plan the state that modules add to their own `state_dict`.

        A module may make some of it in its first step only.
        """
        present = without_apart(unit, extra_states(unit))
        takeable: list[str] = []
        for number in range(len(unit.models)):
            prefix = unit.qualify(number, "")
            keys = {key.removeprefix(prefix): key for key in saved if key.startswith(prefix)}
            for module, names in takers(unit, number, keys).items():
                encoded = {name: saved[keys[key]] for name, key in names.items()}
                here = {name: present[keys[key]] for name, key in names.items() if keys[key] in present}
                takeable += [keys[key] for key in names.values()]
                what = f"extra state of {unit.name}: {', '.join(names.values())} ({class_of(module)})"
                self._give(what, encoded, partial(restore_extra, module, here))
        self._problems.compare(f"{unit.name}: extra state ", saved, [*present, *takeable])

    def _loaders(self) -> None:
        """Positions in the data.

        One that its loader cannot take is a difference like others.
        """
        positions = self.checkpoint.decode(self._own["loaders"], "loaders")
        loaders = self.run.prepared.loaders
        self._problems.compare("dataloader ", range(len(positions)), range(len(loaders)))
        for number, (loader, position) in enumerate(zip(loaders, positions, strict=False)):
            try:
                loader.check_state_dict(position)
            except CheckpointError as error:  # without `strict` it begins where it stands
                found, _, remedy = str(error).partition("\n")
                self._problems.found.append(f"dataloader {number}: {found}; {remedy}")
            else:
                self._objects.append((f"dataloader {number}", partial(loader.load_state_dict, position)))

    def _fill(self, what: str, leaves: Mapping[str, Leaf], saved: Mapping[str, Stored]) -> set[str]:
        """Note what is to be copied; gives the names of what does not fit."""
        misfits, places = set(), []
        self._problems.compare(what, saved, leaves)
        for name, stored in saved.items():
            if name in leaves and self._problems.tensor_fits(f"{what}{name}", leaves[name], stored):
                stored.require(leaves[name])
                places.append((stored, leaves[name]))
            elif name in leaves:
                misfits.add(name)
        self._places += places
        if places:
            self._copies.append((what.removesuffix("/"), partial(fill, places)))
        return misfits

    def _pair(self, what: str, saved: Sequence[Any], here: Sequence[Any]) -> list[tuple[str, Any, Any]]:
        """Objects, in words and themselves, and their saved states, encoded.

        By position. Those that are not of one class are noted, and left out.
        """
        pairs = []
        self._problems.compare(what, range(len(saved)), range(len(here)))
        for number, (described, item) in enumerate(zip(saved, here, strict=False)):
            if described["class"] == class_of(item):
                name = f"{what}{number} ({class_of(item)})"
                pairs.append((name, item, described["state"]))
            else:
                classes = f"is a {described['class']} in the checkpoint, a {class_of(item)} here"
                self._problems.fatal.append(f"{what}{number} {classes}")
        return pairs

    def _plugins(self, unit: Unit, tensors: Mapping[str, Stored]) -> None:
        """Plugins' own entries.

        One that is not in this stack cannot take them back, and one that was not in the checkpoint's has
        none to take: logged, no error.
        """
        restored: dict[str, dict[str, Entry]] = {}
        leaves: dict[str, Leaf] = {}
        known, anew = {key.partition("/")[0] for key in tensors}, set[str]()
        saving = {hook.plugin: hook.call for hook in unit.hooks.implementations("save_state")}
        for plugin, save in saving.items():
            entries: Mapping[str, Entry] = save(unit) or {}
            for name, entry in entries.items():
                if isinstance(entry.value, Leaf) and entry.scope in self._scopes:
                    if plugin not in known:
                        anew.add(plugin)
                        continue
                    key = entry_key(self.run, plugin, name, entry)
                    leaves[key] = entry.value
                    if key in tensors:
                        restored.setdefault(plugin, {})[name] = entry
        for plugin in sorted(anew):
            self._problems.warn(f"{unit.name}: it has no state of plugin {plugin}, which begins anew")
        stored = {key: tensors[key] for key in leaves if key in tensors}
        for key in sorted(self._fill(f"{unit.name}: plugins/", leaves, stored)):
            self._problems.fatal.append(f"{unit.name}: {key} belongs to a plugin, and is taken whole")
        for scope, plugin, encoded in self._plain_entries(unit):
            taken = restored.setdefault(plugin, {})
            for name in encoded.keys() - taken.keys():
                value = self.checkpoint.decode(encoded[name], f"units.{unit.name}.{plugin}.{name}")
                taken[name] = Entry(value=value, scope=scope)
        self._give_back(unit, restored)

    def _give_back(self, unit: Unit, restored: Mapping[str, Mapping[str, Entry]]) -> None:
        """Let plugins take back their entries, some of them none; warn of entries that none takes."""
        loading = unit.hooks.implementations("load_state")
        for plugin, load in loading:
            what = f"{unit.name}: state of plugin {plugin}"
            self._copies.append((what, partial(load, unit, restored.get(plugin, {}))))
        for plugin in sorted(restored.keys() - {each.plugin for each in loading}):
            if not all(isinstance(entry.value, Leaf) for entry in restored[plugin].values()):
                why = "which is not in this stack, or has no hook load_state"
                self._problems.warn(f"{unit.name}: state of plugin {plugin}, {why}, is left out")

    def _plain_entries(self, unit: Unit) -> Iterator[tuple[Scope, str, Mapping[str, Any]]]:
        """(scope, plugin, name -> encoded value) of each rank to take them from."""
        for scope, states in self._scopes.items():
            for state in states:
                for plugin, encoded in state["plugins"][unit.name].get(scope, {}).items():
                    yield scope, plugin, encoded

    @contextmanager
    def _understood(self, what: str) -> Iterator[None]:
        """Note as a problem any error of code that reads values of any content."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # torch's, Python's and numpy's generators raise what they like
            self._problems.fatal.append(f"{what}: {type(error).__name__}: {error}")


def _mixed(folder: object, what: str, done: Sequence[str], error: Exception) -> CheckpointError:
    """Return the error for an action that failed after others were done."""
    state = "nothing else was changed"
    if done:
        more = f" and {len(done) - 5} more" if len(done) > 5 else ""
        state = f"the run is in a mixed state: of {folder} it has {', '.join(done[:5])}{more}"
    return CheckpointError(
        f"load_state: {what} could not be restored, and may be half loaded: {type(error).__name__}: {error}\n"
        f"{state}\nload it into a new run, once that object takes back what it gave",
        path=str(folder),
    )
