"""Objects with a `state_dict` (loaders, registered objects, plugins of the run), and the caller's `extra`.

Their `load_state_dict` is code of other people, which runs before core copies any state because it may fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from accel_core.errors import CheckpointError
from accel_core.storage.codec import encode
from accel_core.storage.wrapped import put_together

if TYPE_CHECKING:
    from accel_core.checkpoint.problems import Problems
    from accel_core.checkpoint.tasks import Restoration, Save
    from accel_core.contract.run import Run
    from accel_core.storage.state import State


def collect(save: Save) -> None:
    """Collect positions in the data for this rank's file, and other objects for the file that ranks share."""
    run, state = save.run, save.state
    loaders = [loader.state_dict() for loader in run.prepared.loaders]
    state.own["loaders"] = state.encode(loaders, f"rank[{run.world.rank}].loaders", replicated=False)
    state.shared["registered"] = encode_objects(state, run.registered, "registered", in_parts=True)
    state.shared["extra"] = state.encode(dict(save.extra or {}), "extra")
    state.shared["run"] = _states_of_run_plugins(run)


def _states_of_run_plugins(run: Run) -> dict[str, Any]:
    """Return plugin -> its state of the whole run; empty except on the main process, which writes it."""
    plugins = run.plugins if run.world.rank == 0 else {}
    saving = {name: plugin for name, plugin in plugins.items() if hasattr(plugin, "state_dict")}
    states = {name: state for name, plugin in saving.items() if (state := plugin.state_dict())}
    return {plugin: encode(dict(state), f"run.{plugin}") for plugin, state in states.items()}


def plan(load: Restoration) -> None:
    """Plan to restore the state of objects."""
    saved, run = load.checkpoint.state, load.run
    with load.problems.noting_errors("dataloaders"):
        _plan_loaders(load)
    registered = pairs(load.problems, "registered object ", saved["registered"], run.registered)
    for what, item, encoded in registered:
        value = put_together(load.checkpoint.decode(encoded, what), cache(item.state_dict), what)
        load.calls.append((what, partial(item.load_state_dict, value)))
    load.plan_call("extra", saved.get("extra", {}), load.extra.update)
    for name, encoded in saved.get("run", {}).items():
        what = f"state of plugin {name}"
        take = getattr(run.plugins.get(name), "load_state_dict", None)
        if take is not None:
            load.plan_call(what, encoded, take)
        else:
            load.problems.warn(f"{what}, which is not in this stack, is left out")


def _plan_loaders(load: Restoration) -> None:
    """Plan to restore positions in the data. A position that its loader refuses is noted as a difference."""
    positions, loaders = load.checkpoint.decode(load.own["loaders"], "loaders"), load.run.prepared.loaders
    load.problems.compare("dataloader ", range(len(positions)), range(len(loaders)))
    for number, (loader, position) in enumerate(zip(loaders, positions, strict=False)):
        try:
            loader.check_state_dict(position)
        except CheckpointError as error:  # without `strict` the loader goes on from where it is
            finding, _, remedy = str(error).partition("\n")
            load.problems.found.append(f"dataloader {number}: {finding}; {remedy}")
        else:
            load.calls.append((f"dataloader {number}", partial(loader.load_state_dict, position)))


def encode_objects(
    state: State, items: Sequence[Any], path: str, *, in_parts: bool = False
) -> list[dict[str, Any]]:
    """Encode objects with a `state_dict`, each with the name of its class.

    Args:
        state: the state that takes large tensors.
        items: the objects.
        path: name of the objects in errors.
        in_parts: as in `State.encode`.
    """
    objects = [(class_of(item), item.state_dict()) for item in items]
    return [
        {"class": kind, "state": state.encode(value, f"{path}[{number}] ({kind})", in_parts=in_parts)}
        for number, (kind, value) in enumerate(objects)
    ]


def pairs(
    problems: Problems, what: str, saved: Sequence[Any], here: Sequence[Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name for people, object, its encoded state), by position.

    Objects whose class differs from the saved class are noted as problems, and left out.
    """
    problems.compare(what, range(len(saved)), range(len(here)))
    for number, (described, item) in enumerate(zip(saved, here, strict=False)):
        kind = class_of(item)
        if described["class"] == kind:
            yield f"{what}{number} ({kind})", item, described["state"]
        else:
            classes = f"is a {described['class']} in the checkpoint, a {kind} here"
            problems.fatal.append(f"{what}{number} {classes}")


def class_of(value: object) -> str:
    """Return the name under which an object's class is recorded."""
    return type(value).__qualname__
