"""A run's state, as this rank has it: leaves for the data file, and plain data for JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from accel_core.checkpoint.codec import encode
from accel_core.checkpoint.leaf import Entry, Leaf, whole
from accel_core.checkpoint.plan import Declared, Key, declare
from accel_core.errors import CheckpointError
from accel_core.native.state import model_tensors

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.run import Run
    from accel_core.unit import Unit

__all__ = ["NEVER_RESTORED", "Collected", "class_of", "collect", "entry_key", "modules_with_extra_state"]

NEVER_RESTORED = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that say how a step is computed, not what."""


@frozen
class Collected:
    """leaves and how each is declared; `shared`: what all ranks have alike; `own`: what only this one has.

    optimizers: unit -> its optimizers' groups and plain state, which ranks may hold in part.
    absent: known parameters and buffers of which this rank offers no leaf.
    """

    leaves: dict[Key, Leaf] = field(factory=dict)
    declared: dict[Key, Declared] = field(factory=dict)
    shared: dict[str, Any] = field(factory=dict)
    own: dict[str, Any] = field(factory=dict)
    optimizers: dict[str, Any] = field(factory=dict)
    absent: list[Key] = field(factory=list)

    def add(self, key: Key, leaf: Leaf, *, spread: bool) -> None:
        """Raises CheckpointError if the key is taken."""
        if key in self.leaves:
            raise CheckpointError(
                f"unit {key[0]!r}: there are two states {key[1]}\na parameter may be in one optimizer only"
            )
        self.leaves[key] = leaf
        self.declared[key] = declare(leaf, spread)

    def encode(self, value: Any, path: str, *, replicated: bool = True) -> Any:
        """`value` as tagged JSON; its large tensors become leaves of the run."""

        def store(where: str, tensor: Tensor) -> str:
            self.add(("", where), whole(tensor, kind="factored", replicated=replicated), spread=replicated)
            return where

        return encode(value, path, store)

    def encode_objects(self, items: Sequence[Any], path: str) -> list[Any]:
        """Objects with a `state_dict`, each with the name of its class, by which it is recognised."""
        named = [(class_of(item), item.state_dict()) for item in items]
        return [
            {"class": name, "state": self.encode(state, f"{path}[{number}] ({name})")}
            for number, (name, state) in enumerate(named)
        ]

    @property
    def optimizers_digest(self) -> str:
        """By which ranks see whether their optimizers are described alike."""
        return xxh3_64_hexdigest(json.dumps(self.optimizers).encode())


def collect(run: Run) -> Collected:
    """All state of the run that this rank has.

    Raises:
        CheckpointError: a unit is inside an accumulation window, or something cannot be stored.
    """
    for unit in run.units:
        _refuse_torn_window(unit)
    found = Collected()
    found.shared["units"] = {unit.name: _unit(found, unit) for unit in run.units}
    found.shared["registered"] = found.encode_objects(run.registered, "registered")
    here = f"rank[{run.world.rank}]"
    found.own["reader"] = run.topology.reader
    found.own["random"] = found.encode(dict(run.hooks.rng_state()), f"{here}.random", replicated=False)
    found.own["loaders"] = [
        found.encode(loader.state_dict(), f"{here}.loaders[{number}]", replicated=False)
        for number, loader in enumerate(run.loaders)
    ]
    return found


def class_of(value: object) -> str:
    """How an object's class is recorded."""
    return type(value).__qualname__


def entry_key(run: Run, plugin: str, name: str, entry: Entry) -> str:
    """The key of a plugin's tensor entry; one that belongs to a rank or reader says so."""
    reader, rank = f"@reader{run.topology.reader}", f"@rank{run.world.rank}"
    owner = {"replicated": "", "per_reader": reader, "per_rank": rank}[entry.scope]
    return f"plugins/{plugin}/{name}{owner}"


def modules_with_extra_state(unit: Unit) -> dict[str, nn.Module]:
    """Canonical name -> module, for modules that have state besides parameters and buffers."""
    return {
        unit.qualify(number, name): module
        for number, model in enumerate(unit.models)
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _unit(found: Collected, unit: Unit) -> dict[str, Any]:
    if not unit.name:
        raise CheckpointError("a unit without a name cannot be stored\nname it: prepare(..., name='student')")
    path = f"units.{unit.name}"
    known, parameters = model_tensors(unit), unit.named_parameters()
    offered = unit.hooks.model_state(unit)
    for name, leaf in offered.items():
        if name not in known:
            raise CheckpointError(
                f"unit {unit.name!r}: the model has no parameter or buffer {name!r}, for which strategy"
                f" {unit.strategy!r} offers state\nthe plugin must use the names of the user's own model"
            )
        # Replicas of buffers may differ (batch norm's statistics do): the lowest rank's are kept.
        found.add((unit.name, f"model/{name}"), leaf, spread=name in parameters)
    found.absent.extend((unit.name, f"model/{name}") for name in known if name not in offered)
    found.optimizers[unit.name] = [_optimizer(found, unit, each, path) for each in unit.optimizers]
    return {
        "strategy": unit.strategy,
        "aliases": dict(unit.aliases),
        "extra": {
            name: found.encode(module.get_extra_state(), f"{path}.{name} (get_extra_state)")
            for name, module in modules_with_extra_state(unit).items()
        },
        "schedulers": found.encode_objects(unit.schedulers, f"{path}.schedulers"),
        "plugins": _plugins(found, unit, path),
    }


def _optimizer(found: Collected, unit: Unit, optimizer: Optimizer, path: str) -> dict[str, Any]:
    state = unit.hooks.optimizer_state(unit, optimizer)
    for name, leaf in state.leaves.items():
        found.add((unit.name, f"optimizer/{name}"), leaf, spread=True)
    path = f"{path} {class_of(optimizer)}"
    groups = [{key: group[key] for key in group if key not in NEVER_RESTORED} for group in state.groups]
    return {
        "class": class_of(optimizer),
        "groups": found.encode(groups, f"{path}.groups"),
        "plain": found.encode({name: dict(plain) for name, plain in state.plain.items()}, f"{path}.state"),
    }


def _plugins(found: Collected, unit: Unit, path: str) -> dict[str, Any]:
    """The plugins' entries that are alike on all ranks; the others go to `own`, tensors to leaves."""
    run = unit.run
    shared: dict[str, dict[str, Any]] = {}
    for each in unit.hooks.implementations("save_state"):
        entries: Mapping[str, Entry] = each.call(unit) or {}
        for name, entry in entries.items():
            replicated = entry.scope == "replicated"
            if isinstance(entry.value, Leaf):
                key = (unit.name, entry_key(run, each.plugin, name, entry))
                found.add(key, entry.value, spread=replicated)
                continue
            place = shared if replicated else found.own.setdefault(entry.scope, {}).setdefault(unit.name, {})
            where = f"{path}.{each.plugin}.{name}" + ("" if replicated else f" of rank {run.world.rank}")
            value = found.encode(entry.value, where, replicated=replicated)
            place.setdefault(each.plugin, {})[name] = value
    return shared


def _refuse_torn_window(unit: Unit) -> None:
    window = unit.window
    if not window.boundary:
        raise CheckpointError(
            f"unit {unit.name!r} has accumulated {window.index + 1} of {window.size} micro-batches, and"
            " partial gradients are not saved\n"
            "save after the window's last one: if accelerator.sync_gradients: accelerator.save_state(...)"
        )
