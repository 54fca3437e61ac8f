"""Loading: everything is verified and compared first; only then is any state touched, in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from accel_core.checkpoint.account import owner_of, restore_extra
from accel_core.checkpoint.agree import agree
from accel_core.checkpoint.collect import (
    class_of,
    entry_key,
    extra_state,
    without_apart,
    without_collecting_garbage,
)
from accel_core.checkpoint.files import understanding
from accel_core.checkpoint.find import find
from accel_core.checkpoint.optimizers import restore_optimizers
from accel_core.checkpoint.problems import Problems
from accel_core.checkpoint.read import Checkpoint, fill
from accel_core.contract.state import Entry, Leaf
from accel_core.distributed.streams import check, reseed, restore, states
from accel_core.distributed.tensor_bytes import bytes_of
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.checkpoint.files import Manifest
    from accel_core.checkpoint.read import Stored
    from accel_core.checkpoint.retention import CheckpointSeries
    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit

__all__ = ["Restoration", "derived_seed", "load"]


Action = tuple[str, Callable[[], object]]
"""What is restored, in words, and how."""
Scope = Literal["replicated", "per_reader", "per_rank"]


def load(
    run: Run,
    series: CheckpointSeries,
    directory: str | os.PathLike[str] | None,
    *,
    strict: bool,
    missing_ok: bool,
) -> tuple[Path, Manifest] | None:
    """See `CheckpointSession.load`. Returns the folder and manifest of what was loaded, if anything was."""
    control = run.collectives("control")
    with without_collecting_garbage():
        checkpoint = find(run, series, directory, missing_ok=missing_ok)
        if checkpoint is None:
            return None

        def compared() -> Restoration:
            with understanding(checkpoint.folder):
                return Restoration(run, checkpoint, strict=strict)

        restoration = agree(control, compared)
        agree(control, restoration.apply)
        return checkpoint.folder, checkpoint.manifest


class Restoration:
    """The actions that bring a run into a checkpoint's state. Making one changes nothing.

    Raises:
        CheckpointError: the checkpoint does not fit the run.
    """

    def __init__(self, run: Run, checkpoint: Checkpoint, *, strict: bool) -> None:
        self.run, self.checkpoint = run, checkpoint
        self._problems = Problems(checkpoint.folder, strict)
        # By what they restore. First what other people's code does, which may fail; then what core copies.
        self._objects: list[Action] = []
        self._copies: list[Action] = []
        world, reader, ranks = checkpoint.manifest.world, run.topology.reader, checkpoint.ranks
        same_readers = world["readers"] == run.topology.readers
        self._same_world = same_readers and world["size"] == run.world.size
        self._own = checkpoint.own(run.world.rank if self._same_world else 0)
        # Scope of plugins' entries -> the rank to take them from, where they mean something in this world.
        self._scopes: dict[Scope, Any] = {"replicated": next(iter(ranks.values()))}
        if same_readers:
            same = [own for own in ranks.values() if own["reader"] == reader]
            self._scopes["per_reader"] = same[0] if same else checkpoint.own(-1)
        if self._same_world:
            self._scopes["per_rank"] = self._own
        else:
            scopes = " and ".join(self._scopes)
            self._problems.warn(f"the world has changed: of plugins' own state, only {scopes} is loaded")
        with self._understood("dataloaders"):
            self._loaders()
        registered = self._paired("registered object ", checkpoint.state["registered"], run.registered)
        self._objects += [(what, partial(item.load_state_dict, state)) for what, item, state in registered]
        parts: list[Mapping[str, Any]] = [self._own, checkpoint.state, *ranks.values()]
        saved = _joined([part["units"] for part in parts if "units" in part])
        self._problems.compare("unit ", saved, [unit.name for unit in run.units])
        for unit in run.units:
            if unit.name in saved:
                self._unit(unit, saved[unit.name])
        with self._understood("random streams"):
            self._random()
        self._problems.settle()

    def apply(self) -> None:
        """Do it.

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
                    raise _mixed(self.checkpoint.folder, what, before, error) from error

    def _unit(self, unit: Unit, saved: Mapping[str, Any]) -> None:
        unit.drop_cut_ties()
        for alias, owner in saved["aliases"].items():
            if unit.aliases.get(alias, alias) != unit.aliases.get(owner, owner):
                found = f"{alias} was tied to {owner}, and is not tied to it here"
                self._problems.found.append(f"{unit.name}: {found}")
        tensors = self._tensors(unit)
        if unit.aliases:
            self._compare_state_of_tied(unit, saved["optimizers"])
        leaves = without_apart(unit, unit.hooks.model_state(unit))
        misfits = self._fill(f"{unit.name}: model/", leaves, without_apart(unit, tensors["model"]))
        self._extra(unit, without_apart(unit, saved["extra"]))
        schedulers = self._paired(f"{unit.name}: scheduler ", saved["schedulers"], unit.schedulers)
        elsewhere = {name for name, leaf in leaves.items() if not leaf.shards}
        described = saved["optimizers"], tensors["optimizer"], elsewhere, misfits
        restore = restore_optimizers(unit, self.checkpoint, *described, self._problems, schedulers)
        self._copies += [*restore]
        self._copies.append((f"{unit.name}", partial(unit.hooks.state_loaded, unit)))
        self._copies.append((f"{unit.name}", unit.begin_anew))
        self._plugins(unit, tensors["plugins"])

    def _extra(self, unit: Unit, saved: Mapping[str, Any]) -> None:
        """What modules put into their own `state_dict`. Some of it may be made in the first step only."""
        here = without_apart(unit, extra_state(unit))
        for number in range(len(unit.models)):
            prefix = unit.qualify(number, "")
            mine = {key.removeprefix(prefix): key for key in saved if key.startswith(prefix)}
            takers = {key: owner_of(unit, number, name) for name, key in mine.items()}
            taken = {key for key, owner in takers.items() if owner is not None or key in here}
            known = {key: None for key in here if key.startswith(prefix)} | dict.fromkeys(taken)
            self._problems.compare(f"{unit.name}: extra state ", mine.values(), known)
            values = {
                name: self.checkpoint.decode(saved[key], f"units.{unit.name}.{key}")
                for name, key in mine.items()
                if key in taken
            }
            if values:
                what = f"extra state of {unit.name}: {', '.join(values)} ({class_of(unit.models[number])})"
                self._objects.append((what, partial(restore_extra, unit, number, values)))

    def _loaders(self) -> None:
        """Positions in the data; one that its loader cannot take is a difference like others."""
        positions = self.checkpoint.decode(self._own["loaders"], "loaders")
        loaders = self.run.loaders
        self._problems.compare("dataloader ", range(len(positions)), range(len(loaders)))
        for number, (loader, position) in enumerate(zip(loaders, positions, strict=False)):
            try:
                loader.check_state_dict(position)
            except CheckpointError as error:  # without `strict` it begins where it stands
                found, _, remedy = str(error).partition("\n")
                self._problems.found.append(f"dataloader {number}: {found}; {remedy}")
            else:
                self._objects.append((f"dataloader {number}", partial(loader.load_state_dict, position)))

    def _tensors(self, unit: Unit) -> dict[str, dict[str, Stored]]:
        """The unit's stored tensors by sort, named as this run names tied weights."""
        found: dict[str, dict[str, Stored]] = {"model": {}, "optimizer": {}, "plugins": {}}
        names: dict[str, str] = {}
        for (name, key), stored in self.checkpoint.tensors.items():
            if name == unit.name:
                sort, _, rest = key.partition("/")
                owner, slash, part = rest.rpartition("/") if sort == "optimizer" else (rest, "", "")
                here = f"{unit.aliases.get(owner, owner)}{slash}{part}"
                known = found[sort].setdefault(here, stored)
                first = names.setdefault(f"{sort}/{here}", key)
                if first != key and not _alike(known, stored):
                    differ = f"{first} and {key} differ in the checkpoint, and are one here, by a tie"
                    self._problems.found.append(f"{unit.name}: {differ}")
        return found

    def _compare_state_of_tied(self, unit: Unit, optimizers: Sequence[Mapping[str, Any]]) -> None:
        """Note weights that are one here, by a tie, and of which optimizers kept other things."""
        kept: dict[str, dict[str, set[str]]] = {}
        keys = [key.partition("/") for name, key in self.checkpoint.tensors if name == unit.name]
        for owner in [rest for sort, _, rest in keys if sort == "model"]:
            kept.setdefault(unit.aliases.get(owner, owner), {})[owner] = set()
        for owner, _, part in [rest.rpartition("/") for sort, _, rest in keys if sort == "optimizer"]:
            kept.get(unit.aliases.get(owner, owner), {}).setdefault(owner, set()).add(part)
        for each in optimizers:
            for group in self.checkpoint.decode(each["groups"], f"units.{unit.name} groups"):
                for name in group["params"]:
                    kept.get(unit.aliases.get(name, name), {}).setdefault(name, set()).add("a group")
        for (first, had), *others in [[*each.items()] for each in kept.values() if each]:
            for name, has in others:
                if had != has:
                    words = [", ".join(sorted(each)) or "nothing" for each in (had, has)]
                    kinds = f"{first} has {words[0]}; {name} has {words[1]}"
                    differ = (
                        f"differ in what their optimizer has of them ({kinds}), and are one here, by a tie"
                    )
                    self._problems.found.append(f"{unit.name}: {first} and {name} {differ}")

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
        if places:
            self._copies.append((what.removesuffix("/"), partial(fill, places)))
        return misfits

    def _paired(self, what: str, saved: Sequence[Any], here: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
        """Objects, in words and themselves, and the states saved for them, by position; those that are not
        of one class are named.
        """
        self._problems.compare(what, range(len(saved)), range(len(here)))
        for number, (each, item) in enumerate(zip(saved, here, strict=False)):
            if each["class"] == class_of(item):
                name = f"{what}{number} ({class_of(item)})"
                yield name, item, self.checkpoint.decode(each["state"], name)
            else:
                found = f"is a {each['class']} in the checkpoint, a {class_of(item)} here"
                self._problems.fatal.append(f"{what}{number} {found}")

    def _plugins(self, unit: Unit, tensors: Mapping[str, Stored]) -> None:
        """Plugins' own entries. One that is not in this stack cannot take them back: logged, no error."""
        given: dict[str, dict[str, Entry]] = {}
        leaves: dict[str, Leaf] = {}
        for each in unit.hooks.implementations("save_state"):
            entries: Mapping[str, Entry] = each.call(unit) or {}
            for name, entry in entries.items():
                if isinstance(entry.value, Leaf) and entry.scope in self._scopes:
                    key = entry_key(self.run, each.plugin, name, entry)
                    leaves[key] = entry.value
                    if key in tensors:
                        given.setdefault(each.plugin, {})[name] = entry
        known = {key: tensors[key] for key in leaves if key in tensors}
        for key in sorted(self._fill(f"{unit.name}: plugins/", leaves, known)):
            self._problems.fatal.append(f"{unit.name}: {key} belongs to a plugin, and is taken whole")
        for scope, own in self._scopes.items():
            for plugin, encoded in own["plugins"][unit.name].get(scope, {}).items():
                values = self.checkpoint.decode(encoded, f"units.{unit.name}.{plugin}")
                entries = {name: Entry(value=value, scope=scope) for name, value in values.items()}
                given.setdefault(plugin, {}).update(entries)
        loading = {each.plugin: each.call for each in unit.hooks.implementations("load_state")}
        for plugin, found in given.items():
            if plugin in loading:
                what = f"{unit.name}: state of plugin {plugin}"
                self._copies.append((what, partial(loading[plugin], unit, found)))
            else:
                what = f"{unit.name}: state of plugin {plugin}, which is not in this stack, is left out"
                self._problems.warn(what)

    def _random(self) -> None:
        streams: dict[str, Tensor] = self.checkpoint.decode(self._own["random"], "random")
        own = states(self.run)
        here = self.run.hooks.rng_state().keys() | own.keys()
        # "kind:index" is a device that the process sees beside the run's own.
        beside = sorted(name for name in streams.keys() ^ here if ":" in name)
        if self._same_world and streams.keys() ^ here == {*beside}:
            if beside:
                seen = f"other devices are visible than when it was saved: {', '.join(beside)}"
                self._problems.warn(f"{seen}; the random streams of all others go on")
            known = {name: state for name, state in streams.items() if name in here - own.keys()}
            self._copies.append(("random streams", partial(self.run.hooks.set_rng_state, known)))
            self._copies.append(("random streams", partial(restore, self.run, streams)))
            self._try_random(known)
            check(self.run, streams)
            return
        first = self.checkpoint.decode(self.checkpoint.own(0)["random"], "random")
        seed = derived_seed(first, self.run.topology.reader)
        self._problems.warn(f"the world or device has changed: random streams start anew, from seed {seed}")
        self._copies.append(("random streams", partial(self.run.hooks.seed, seed, self.run.topology)))
        self._copies.append(("random streams", partial(reseed, self.run, derived_seed(first, 0))))
        if self.run.topology.reader == 0:  # loaders draw the orders of the next epochs from rank 0's
            goes_on = partial(self.run.hooks.set_rng_state, {"torch": first["torch"]})
            self._try_random({"torch": first["torch"]})
            self._copies.append(("random streams", goes_on))

    def _try_random(self, streams: Mapping[str, Tensor]) -> None:
        """Find out whether the generators take these states, and put them back as they are."""
        before = self.run.hooks.rng_state()
        try:
            self.run.hooks.set_rng_state(streams)
        finally:
            self.run.hooks.set_rng_state(before)

    @contextmanager
    def _understood(self, what: str) -> Iterator[None]:
        """Around what reads values of any content: what they cannot be used for is a problem."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # torch's, Python's and numpy's generators raise what they like
            self._problems.fatal.append(f"{what}: {type(error).__name__}: {error}")


def _alike(one: Stored, other: Stored) -> bool:
    """Whether they have the same contents."""
    return (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout) and bytes_of(
        one.tensor()
    ) == bytes_of(other.tensor())


def _mixed(folder: Path, what: str, done: Sequence[str], error: Exception) -> CheckpointError:
    """What to raise for an action that failed after those that are done."""
    state = "nothing else was changed"
    if done:
        more = f" and {len(done) - 5} more" if len(done) > 5 else ""
        state = f"the run is in a mixed state: of {folder} it has {', '.join(done[:5])}{more}"
    return CheckpointError(
        f"load_state: {what} could not be restored, and may be half loaded: {type(error).__name__}: {error}\n"
        f"{state}\nload it into a new run, once that object takes back what it gave",
        path=str(folder),
    )


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Units as several ranks have described them; where two tell of one thing, the first is right."""
    found: dict[str, dict[str, Any]] = {}
    for part in reversed(parts):
        for name, unit in part.items():
            known = found.setdefault(name, {"aliases": {}, "extra": {}, "optimizers": []})
            known["schedulers"] = unit["schedulers"]
            known["aliases"].update(unit["aliases"])
            known["extra"].update(unit["extra"])
            told = [_names(each) for each in unit["optimizers"]]
            others = [each for each in known["optimizers"] if _names(each) not in told]
            known["optimizers"] = others + unit["optimizers"]
    return found


def _names(optimizer: Mapping[str, Any]) -> set[str]:
    """Parameters of an optimizer that a rank has described; where they are the same, so is the optimizer."""
    return {name for group in optimizer["groups"] for name in group["params"]}


def derived_seed(streams: Mapping[str, Tensor], reader: int) -> int:
    """The seed of a reader in another world than the checkpoint's, from rank 0's random streams there."""
    content = b"".join(bytes(bytes_of(streams[name])) for name in sorted(streams))
    return xxh3_64_intdigest(content + reader.to_bytes(8, "big")) % (1 << 32)
