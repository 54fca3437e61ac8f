"""`save_state` and `load_state` by Accelerate's rules."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

import accel_core
from accel_compat.notices import warn_once
from accel_compat.state.output import get_logger
from accel_compat.unsupported import NotServedError
from accel_core import CheckpointError

_logger = get_logger("accelerate.accelerator")
_PATIENCE_SECONDS = 600.0

Hooks = OrderedDict[int, Callable[..., None]]

_SAVED_THERE = (
    "{0} was saved by Accelerate itself, in its own files\n"
    "bring it over with accel-checkpoint-tools: accel checkpoint import --format accelerate {0} NEW --like"
    " FRESH, where FRESH is what this program saves before it trains"
)


class NoStateError(CheckpointError, ValueError):
    """There is nothing to load, as Accelerate says it by a ValueError."""


def save_state(
    accelerator: Any, output_dir: Any, safe_serialization: bool, given: dict[str, Any]
) -> Path | str:
    """Write a state, and return its path as given."""
    options = _taken(given, ("step", "wait"))
    if not safe_serialization or given:
        warn_once("save_state: weights are always written by safetensors; other arguments have no effect")
    _tell_the_run(accelerator)
    target = asked = _target(accelerator, output_dir)
    _logger.info("Saving current state to %s", target)
    with _hooked(accelerator, target) as made:
        target = _write(accelerator, target, {"step": accelerator.step, **options})
        if made is not None and any(path != made for path in made.parent.rglob("*")):
            accelerator.wait_for_checkpoint()
            _deliver(accelerator, made, _folder_for_hooks(target))
    _logger.info("All states saved in %s", target)
    accelerator.project_configuration.iteration = accelerator.run.checkpoints.series.next_number
    # A number that another run has used is left out: the folder is then another than was asked for.
    return asked.with_name(Path(target).name) if isinstance(asked, Path) else str(target)


def _write(accelerator: Any, target: Path | str, options: Mapping[str, Any]) -> Path | str:
    numbered, series = accelerator.project_configuration.automatic_checkpoint_naming, _series(accelerator)
    alone = _saves_alone(accelerator)
    if accelerator.is_main_process or not alone:
        where = None if numbered else target
        saved: Path | str = accel_core.Accelerator.save_state(accelerator, where, alone=alone, **options)
        return saved
    waiting = [unit.name for unit in accelerator.run.units if unit.pending or not unit.window.boundary]
    if waiting:  # the main process raises too
        raise CheckpointError(
            f"save_state: on rank {accelerator.process_index} unit {waiting[0]!r} has gradients that no"
            " optimizer has applied, and gradients are not saved\n"
            "save after optimizer.step(), or drop them first with optimizer.zero_grad()"
        )
    number = series.next_number
    if numbered and isinstance(target, Path):
        number = max(number, accelerator._newest_number + 1)
        target = target.with_name(f"checkpoint_{number}")
    series.number_from(number + 1)
    return target


def _series(accelerator: Any) -> Any:
    return accelerator.run.checkpoints.series


def note_numbers(accelerator: Any) -> None:
    """Note which checkpoint of the project the main process finds. Collective.

    It goes on with the number after that, where processes save without a word between them.
    """
    project = accelerator.run.config.project
    accelerator._newest_number = -1
    if accelerator.run.world.size > 1 and project.automatic_checkpoint_naming:
        folder, names = _place(f"{project.project_dir or '.'}/checkpoints"), []
        if accelerator.is_main_process and isinstance(folder, Path) and folder.is_dir():
            names = os.listdir(folder)
        numbers = [int(name[11:]) for name in names if re.fullmatch(r"checkpoint_(0|[1-9]\d*)", name)]
        control = accelerator.run.collectives("control")
        accelerator._newest_number = control.broadcast_object(max(numbers, default=-1))


def _saves_alone(accelerator: Any) -> bool:
    """Return whether the main process writes alone, as each rank has all state."""
    run, config = accelerator.run, accelerator.run.config
    return (
        run.world.size > 1
        and not accelerator.is_divided
        and run.mesh is None
        and all(unit.mesh is None for unit in run.units)
        and not _is_copied(accelerator)
        and not config.project.save_on_each_node
        and not config.data.use_stateful_dataloader
    )


def _is_copied(accelerator: Any) -> bool:
    """Return True if the extension `mirror` copies checkpoints: it copies those that all ranks saved."""
    return "mirror" in accelerator.run.plugins


def _target(accelerator: Any, output_dir: Any) -> Path | str:
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:  # then a folder that is given means nothing, as in Accelerate
        return _place(f"{project.project_dir or '.'}/checkpoints/checkpoint_{project.iteration}")
    if output_dir is None:
        raise NoStateError(
            "No output_dir provided and automatic checkpoint naming is disabled.\n"
            "call accelerator.save_state('path/of/the/checkpoint')"
        )
    return _place(output_dir)


def _tell_the_run(accelerator: Any) -> None:
    """Give the run the program's `project_configuration`, assigned or edited."""
    project = accelerator.project_configuration
    accelerator.run.reconfigure(project=project.to_ours())
    _series(accelerator).number_from(project.iteration)


# -- hooks ---------------------------------------------------------------------------------------


@contextmanager
def _hooked(accelerator: Any, target: Path | str) -> Iterator[Path | None]:
    """Run save hooks; yield their folder.

    Inside, models whose weights the hooks took are left out of saved states. Yields None without hooks.
    """
    hooks = accelerator._save_model_state_pre_hook
    if not hooks:
        yield None
        return
    _refuse_hooks_with_copies(accelerator)
    target = _folder_for_hooks(target)
    models = [] if accelerator.is_divided else list(accelerator._models)
    weights = [model.state_dict() for model in models]
    known = [(each, list(each.items())) for each in weights]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.hooks-", dir=target.parent) as folder:
        made = Path(folder, target.name)
        made.mkdir()
        for hook in hooks.values():
            hook(list(accelerator._models), weights, str(made))
        _refuse_changed(known, weights)
        pairs = zip(models, known, strict=True)
        taken = [model for model, (given, _) in pairs if not any(given is each for each in weights)]
        accelerator.run.exclude_from_checkpoints(taken)
        try:
            yield made
        finally:
            accelerator.run.exclude_from_checkpoints([])


def _refuse_hooks_with_copies(accelerator: Any) -> None:
    if _is_copied(accelerator):
        raise NotServedError(
            "hooks of saved states write and read local files, and the extension mirror copies"
            " checkpoints without these\nremove the hooks, or the extension"
        )


def _deliver(accelerator: Any, made: Path, target: Path) -> None:
    """Move what hooks wrote on this rank into the checkpoint, once it is there."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not accel_core.commits(accel_core.storage_at(target)):  # the main process saves it
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"save_state: a hook wrote files on rank {accelerator.process_index}, and the main process"
                f" has not saved {target}\ncall save_state on the main process too"
            )
        time.sleep(0.05)
    for folder, place in ((made, target), (made.parent, target.parent)):  # a hook may write beside it
        for each in folder.iterdir():
            if each == made:
                continue
            if (place / each.name).is_dir() and each.is_dir():
                shutil.copytree(each, place / each.name, dirs_exist_ok=True)
            else:
                os.replace(each, place / each.name)


def _refuse_changed(known: Sequence[tuple[Any, Any]], weights: Sequence[Any]) -> None:
    for left in weights:
        before = next((items for given, items in known if given is left), None)
        same = before is not None and len(before) == len(left)
        if not same or any(left.get(name) is not tensor for name, tensor in before or ()):
            raise NotServedError(
                "a save hook changed weights: the state of the prepared models is written as it is\n"
                "take the weights out of the list (weights.pop()), and write others into output_dir"
            )


def register_hook(table: Hooks, hook: Callable[..., None]) -> RemovableHandle:
    """Add a hook, and return the handle that removes it."""
    handle = RemovableHandle(table)
    table[handle.id] = hook
    return handle


# -- loading -------------------------------------------------------------------------------------


def load_state(accelerator: Any, input_dir: Any, load_kwargs: Any, given: dict[str, Any]) -> None:
    """Restore a state. Collective."""
    options = _options_of_load(load_kwargs, given)
    _tell_the_run(accelerator)
    project = accelerator.project_configuration
    if input_dir is None and not project.automatic_checkpoint_naming:
        raise NoStateError("No input_dir provided and automatic checkpoint naming is disabled.")
    accelerator.wait_for_everyone()  # the main process may still be writing it
    place = _place(f"{project.project_dir or '.'}/checkpoints" if input_dir is None else input_dir)
    if input_dir is None and accelerator._load_model_state_pre_hook:
        _refuse_hooks_with_copies(accelerator)
        input_dir = _newest(_folder_for_hooks(place))
        place = _place(input_dir or place)
    _logger.info("Loading states from %s", input_dir)
    with _without_taken(accelerator, input_dir):
        try:
            loaded = _place(str(accel_core.Accelerator.load_state(accelerator, input_dir, **options)))
        except CheckpointError as error:
            if input_dir is None and _is_copied(accelerator):
                raise
            _explain_missing(input_dir, place, error)
            raise
    manifest = accel_core.read_manifest(accel_core.storage_at(loaded))
    accelerator._count = int(manifest.members["step"] or 0)
    project.iteration = _series(accelerator).next_number
    note_numbers(accelerator)
    _logger.info("All states loaded from %s", loaded)


@contextmanager
def _without_taken(accelerator: Any, input_dir: Any) -> Iterator[None]:
    """Run load hooks; inside, models that they took from their list are not loaded."""
    models = [] if accelerator.is_divided else list(accelerator._models)
    known = list(models)
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(models, str(input_dir))
    accelerator.run.exclude_from_checkpoints(
        model for model in known if not any(model is each for each in models)
    )
    try:
        yield
    finally:
        accelerator.run.exclude_from_checkpoints([])


def _explain_missing(input_dir: Any, place: Path | str, error: CheckpointError) -> None:
    """Raise NoStateError where there is no state, or one of Accelerate's own."""
    if isinstance(place, str):
        return
    if input_dir is None or not place.is_dir():
        text = f"Tried to find {input_dir} but folder does not exist\n{error}"
        raise NoStateError(text, path=str(input_dir)) from error
    is_checkpoint = accel_core.commits(accel_core.storage_at(place))
    if not is_checkpoint and any(place.glob("random_states_*.pkl")):
        raise NoStateError(_SAVED_THERE.format(place), path=str(place)) from error


def _options_of_load(load_kwargs: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of core's load.

    Raises:
        TypeError: one is not known.
    """
    options = _taken(given, ("strict",))
    if _taken(given, ("map_location",)) or load_kwargs:
        warn_once("load_state: arguments for torch.load have no effect; no pickle is read")
    if given:
        raise TypeError(
            f"load_state has no argument {next(iter(given))!r}: it loads all\n"
            "leave it out; strict=False leaves alone what the checkpoint lacks"
        )
    return options


def refuse_stateless(objects: Sequence[Any]) -> None:
    """Raise ValueError for objects that cannot be saved and restored."""
    wrong = [
        f"- Item at index {number}, `{thing}`"
        for number, thing in enumerate(objects)
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"))
    ]
    if wrong:
        raise ValueError(
            "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. The"
            " following inputs are invalid:\n" + "\n".join(wrong)
        )


def _place(given: str | os.PathLike[str]) -> Path | str:
    """Return a folder's path; a URL stays text."""
    text = os.fspath(given)
    return text if "://" in text else Path(text).expanduser()


def _folder_for_hooks(place: Path | str) -> Path:
    """Return the folder, since hooks write and read local files."""
    if isinstance(place, str):
        raise NotServedError(
            f"hooks of saved states write and read local files, and {place} is a URL\n"
            "save to a local folder, or remove the hooks"
        )
    return place


def _newest(folder: Path) -> str | None:
    numbered = [each for each in folder.glob("checkpoint_*") if each.name.rpartition("_")[2].isdigit()]
    return str(max(numbered, key=lambda each: int(each.name.rpartition("_")[2]), default="")) or None


def _taken(given: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: given.pop(name) for name in names if name in given}
