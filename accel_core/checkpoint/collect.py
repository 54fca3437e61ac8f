"""Collect a run's state: leaves for the data file, and plain data for JSON."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from xxhash import xxh3_64_hexdigest

from accel_core.checkpoint.defaults import model_state
from accel_core.checkpoint.extra import extra_state, tell_of_hooks_that_only_save
from accel_core.checkpoint.numbers import require_alike
from accel_core.contract.state import Entry, Leaf
from accel_core.distributed.random import stream_states
from accel_core.distributed.streams import states
from accel_core.errors import CheckpointError
from accel_core.storage.codec import encode
from accel_core.storage.files import as_json
from accel_core.storage.state import State

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit

T = TypeVar("T")

logger = logging.getLogger(__name__)

NEVER_RESTORED = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that say how a step is computed, not what."""


def collect(
    run: Run, numbers: Mapping[str, Any], extra: Mapping[str, Any] | None = None, *, alone: bool
) -> State:
    """Collect the state of the run that this rank has.

    numbers: see `numbers_of`. extra: values of the caller's own. alone: as rank 0 and reader 0, the only ones
    of the checkpoint, whatever this rank is.

    Raises:
        CheckpointError: a unit has gradients that are not applied yet, or something cannot be stored.
    """
    if run.mark_step is not None:
        run.mark_step("state")
    for unit in run.units:
        unit.names.drop_cut_ties()
    state, path = State(), f"rank[{run.world.rank}]"
    plugins = {unit.name: _plugins(state, unit, alone=alone) for unit in run.units}
    loaders = [loader.state_dict() for loader in run.prepared.loaders]
    units = {unit.name: _unit(state, unit) for unit in run.units}
    registered = encoded_objects(state, run.registered, "registered", in_parts=True)
    encoded = state.encode(dict(extra or {}), "extra")
    state.shared = {
        "units": units,
        "prepared": _prepared(run),
        "steps_done": [proxy.steps_done for _, proxy in run.prepared.optimizers],
        "registered": registered,
        "extra": encoded,
        "run": _run_state(run),
    }
    random = {**stream_states(run), **states(run)}
    state.own = {
        "reader": 0 if alone else run.topology.reader,
        "random": state.encode(random, f"{path}.random", replicated=False),
        "loaders": state.encode(loaders, f"{path}.loaders", replicated=False),
        "plugins": plugins,
    }
    digests = [xxh3_64_hexdigest(as_json(each)) for each in (units, *registered, encoded)]
    state.note, state.check = (digests, numbers), partial(_check_names, run)
    return state


def encoded_objects(state: State, items: Sequence[Any], path: str, *, in_parts: bool = False) -> list[Any]:
    """Encode objects with a `state_dict`, each with the name of its class.

    in_parts: as in `State.encode`.
    """
    objects = [(class_of(item), item.state_dict()) for item in items]
    return [
        {"class": kind, "state": state.encode(value, f"{path}[{number}] ({kind})", in_parts=in_parts)}
        for number, (kind, value) in enumerate(objects)
    ]


def settle(state: State, notes: Sequence[Any], rank: int) -> None:
    """Move state that differs from rank 0's (pipeline stages) into this rank's file.

    Of registered objects and `extra` rank 0's values are saved; where others differ it says so, once.

    notes: of all ranks.

    Raises:
        CheckpointError: ranks have different metrics, or registered more or fewer objects. On all of them.
    """
    digests, numbers = zip(*notes, strict=True)
    require_alike(numbers)
    registered = [len(told) - 1 for told in digests]
    if len({*registered}) > 1:
        listed = "\n".join(f"  rank {other}: {count}" for other, count in enumerate(registered))
        raise CheckpointError(
            f"save_state: ranks have registered different numbers of objects\n{listed}\n"
            "call register_for_checkpointing on all ranks alike"
        )
    if digests[rank][0] != digests[0][0]:
        state.own["units"] = state.shared["units"]
    objects = enumerate(state.shared["registered"])
    named = [f"registered object {number} ({each['class']})" for number, each in objects]
    for number, what in enumerate([*named, "save_state(extra=...)"], 1) if rank == 0 else ():
        if len({told[number] for told in digests}) > 1:
            _tell_of_others(what)


@cache
def _tell_of_others(what: str) -> None:
    logger.warning(
        "%s has other values on other ranks than on rank 0, whose values are saved; make them equal before"
        " save_state, by reduce for example",
        what,
    )


def _check_names(run: Run, state: State) -> None:
    """Raise CheckpointError if a plugin offers other names than the user's model has."""
    for unit in run.units:
        keys = [(key.partition("/"), leaf) for (name, key), leaf in state.leaves.items() if name == unit.name]
        offered = {name: leaf for (sort, _, name), leaf in keys if sort == "model"}
        known = without_apart(unit, model_state(unit)).keys()
        # Without shards it may be of a part of the model that only other ranks have.
        if odd := [n for n in sorted(offered.keys() ^ known) if n in known or offered[n].shards]:
            raise CheckpointError(
                f"unit {unit.name!r}: only one of the model and the state that strategy {unit.strategy!r}"
                f" offers has {', '.join(odd[:10])}\n"
                "the plugin must use the names of the user's own model, and offer a leaf for each"
            )


@contextmanager
def without_collecting_garbage() -> Iterator[None]:
    """Keep the garbage collector off while many objects are made and dropped at once.

    A search for cycles would find none, and take as long as the rest of a save.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()


def class_of(value: object) -> str:
    """Return the name under which an object's class is recorded."""
    return type(value).__qualname__


def entry_key(run: Run, plugin: str, name: str, entry: Entry, *, alone: bool = False) -> str:
    """Return the key of a plugin's entry, with the rank or reader it belongs to.

    alone: as in `collect`.
    """
    reader, rank = (0, 0) if alone else (run.topology.reader, run.world.rank)
    owner = {"per_reader": f"@reader{reader}", "per_rank": f"@rank{rank}"}
    return f"{plugin}/{name}{owner.get(entry.scope, '')}"


def extra_states(unit: Unit) -> dict[str, Any]:
    """Return the extra state of all models of the unit, by its keys in `state_dict`."""
    return {
        f"{unit.qualify(number, '')}{key}": value
        for number in range(len(unit.models))
        for key, value in extra_state(unit, number).items()
    }


def without_apart(unit: Unit, named: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of `named` without those of models in `Run.unsaved_models`."""
    places = filter(None, map(unit.run.prepared.place_of, unit.run.unsaved_models))
    apart = [str(number) for owner, number in places if owner is unit]
    if len(unit.wrapped) == 1:
        return {} if apart else dict(named)
    return {name: each for name, each in named.items() if name.partition(".")[0] not in apart}


def _run_state(run: Run) -> dict[str, Any]:
    """Plugin -> its state of the whole run; of the main process, whose file has it."""
    plugins = run.plugins if run.world.rank == 0 else {}
    saving = {name: plugin for name, plugin in plugins.items() if hasattr(plugin, "state_dict")}
    states = {name: state for name, plugin in saving.items() if (state := plugin.state_dict())}
    return {plugin: encode(dict(state), f"run.{plugin}") for plugin, state in states.items()}


def _prepared(run: Run) -> dict[str, list[tuple[str, int]]]:
    """Return (unit, number there) of prepared objects by sort, in `prepare`'s order."""
    inside = {id(proxy): proxy.optimizer for _, proxy in run.prepared.optimizers}
    inside |= {id(proxy): proxy.scheduler for _, proxy in run.prepared.schedulers}
    places: dict[str, list[tuple[str, int]]] = {"models": [], "optimizers": [], "schedulers": []}
    for thing in [inside.get(id(proxy), proxy) for proxy in run.prepared.ordered]:
        for unit in run.units:
            held: tuple[Sequence[Any], ...] = (unit.wrapped, unit.optimizers, unit.schedulers)
            for found, items in zip(places.values(), held, strict=True):
                found += [(unit.name, number) for number, item in enumerate(items) if item is thing]
    return places


def _unit(collected: State, unit: Unit) -> dict[str, Any]:
    path = f"units.{unit.name}"
    buffers = {
        unit.qualify(number, name)
        for number, model in enumerate(unit.models)
        for name, _ in model.named_buffers(remove_duplicate=False)
    }
    if unit.pending or not unit.window.boundary:
        raise _unapplied(unit)
    for name, leaf in without_apart(unit, unit.hooks.model_state(unit)).items():
        # Replicas of buffers may differ (batch norm's statistics do): the lowest rank's are kept.
        collected.add((unit.name, f"model/{name}"), leaf, spread=name not in buffers)
        if name in buffers:
            _refuse_expanded(unit, name, leaf)
    extra = without_apart(unit, extra_states(unit))
    tell_of_hooks_that_only_save(unit, extra)
    listed: set[str] = set()
    return {
        "strategy": unit.strategy,
        "models": len(unit.models),
        "aliases": dict(unit.aliases),
        "extra": {
            name: collected.encode(value, f"{path}.{name} (in its state_dict)")
            for name, value in extra.items()
        },
        "optimizers": [_optimizer(collected, unit, optimizer, path, listed) for optimizer in unit.optimizers],
        "schedulers": encoded_objects(collected, unit.schedulers, f"{path}.schedulers"),
    }


def _refuse_expanded(unit: Unit, name: str, leaf: Leaf) -> None:
    """Refuse a buffer that a load could not write: its elements share memory."""
    for _, tensor in leaf.shards:
        if tensor.numel() > 1 and any(
            not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise CheckpointError(
                f"unit {unit.name!r}: buffer {name} was made by expand, and a load cannot write into memory"
                " that its elements share\nmake it a tensor of its own with clone(), or persistent=False"
            )


def _unapplied(unit: Unit) -> CheckpointError:
    window = unit.window
    if window.boundary:
        return CheckpointError(
            f"unit {unit.name!r} has gradients that no optimizer has applied, and gradients are not saved\n"
            "save after optimizer.step(), or drop them first with optimizer.zero_grad()"
        )
    return CheckpointError(
        f"unit {unit.name!r} has accumulated {window.index + 1} of {window.size} micro-batches, and"
        " partial gradients are not saved\n"
        "save after the window's last one: if accelerator.sync_gradients: accelerator.save_state(...)"
    )


def _optimizer(
    collected: State, unit: Unit, optimizer: Optimizer, path: str, listed: set[str]
) -> dict[str, Any]:
    """Describe an optimizer, and collect its tensors.

    listed: the parameters of the optimizers before it, to which its own are added.
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
    path = f"{path} {class_of(optimizer)}"
    groups = [{key: group[key] for key in group if key not in NEVER_RESTORED} for group in state.groups]
    return {
        "class": state.algorithm or class_of(optimizer),
        "groups": collected.encode(groups, f"{path}.groups"),
        "plain": collected.encode(
            {name: dict(plain) for name, plain in state.plain.items()}, f"{path}.state"
        ),
    }


def _plugins(collected: State, unit: Unit, *, alone: bool) -> dict[str, dict[str, dict[str, Any]]]:
    """Scope -> plugin -> the plugin's plain entries; tensor entries become leaves."""
    plain: dict[str, dict[str, dict[str, Any]]] = {}
    for plugin, save in unit.hooks.implementations("save_state"):
        for name, entry in (save(unit) or {}).items():
            key = "plugins/" + entry_key(unit.run, plugin, name, entry, alone=alone)
            if isinstance(entry.value, Leaf):
                collected.add((unit.name, key), entry.value)
            else:
                value = collected.encode(
                    entry.value, f"{unit.name}.{key}", replicated=entry.scope != "per_rank"
                )
                plain.setdefault(entry.scope, {}).setdefault(plugin, {})[name] = value
    return plain
