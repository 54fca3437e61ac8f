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
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from torch.utils.hooks import RemovableHandle

import accel_core
from accel_compat.accelerator import rank_files as _rank_states
from accel_compat.accelerator.ranks import Ranks
from accel_compat.configs.enums import DistributedType
from accel_compat.modeling.wrappers import save_of
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


def field_of(config: str, name: str, *, is_settable: bool = False) -> Any:
    """Make a property of a field of one of an Accelerator's config objects."""

    def put(self: Any, value: Any) -> None:
        setattr(getattr(self, config), name, value)

    return property(attrgetter(f"{config}.{name}"), put if is_settable else None, doc=f"`{config}.{name}`.")


class NoStateError(CheckpointError, ValueError):
    """There is nothing to load, as Accelerate says it by a ValueError."""


class States(Ranks):
    """An Accelerator's checkpoints."""

    step: int
    _count: int
    _models: list[Any]
    _apart: list[Any]
    """Models that were taken out of `_models`."""
    project_configuration: Any = None  # core's is a property
    """The run's folders, a ProjectConfiguration. Settable, and so are its fields."""
    _save_model_state_pre_hook: Hooks
    _load_model_state_pre_hook: Hooks
    _divided: ClassVar[frozenset[DistributedType]] = frozenset(
        {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}
    )
    """Strategies whose ranks hold parts, so that they save together."""

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before a state is written.

        What it takes out of `weights` is not written; what it writes into `output_dir` is kept there.
        """
        return _registered(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before a load.

        Models that the hook removes from the list are not loaded.
        """
        return _registered(self._load_model_state_pre_hook, hook)

    _newest_there = -1
    project_dir = field_of("project_configuration", "project_dir")
    logging_dir = field_of("project_configuration", "logging_dir")
    save_iteration = field_of("project_configuration", "iteration")

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object once, or once per node where `save_on_each_node` is set."""
        each_node = self.project_configuration.save_on_each_node
        save_of(self.run, obj, f, each_node, safe_serialization)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path | str:
        """Write everything that training needs to go on, and return the path as given.

        Where each rank holds the whole state, the main process writes it, whether others call or not, and
        each rank that calls adds its random numbers. Else all ranks must call.

        Raises CheckpointError, on each rank that has them, if gradients are not applied yet.
        """
        options = _taken(save_model_func_kwargs, ("step", "wait"))
        if not safe_serialization or save_model_func_kwargs:
            warn_once("save_state: weights are always written by safetensors; other arguments have no effect")
        self._tell_the_run()
        target = asked = self._target(output_dir)
        _logger.info("Saving current state to %s", target)
        with self._hooked(target) as made:
            target = self._write(target, {"step": self.step, **options})
            if made is not None and any(path != made for path in made.parent.rglob("*")):
                self.wait_for_checkpoint()
                self._deliver(made, _folder_for_hooks(target))
        self.project_configuration.iteration = self.run.checkpoints.series.next_number
        # A number that another run has used is left out: the folder is then another than was asked for.
        return asked.with_name(Path(target).name) if isinstance(asked, Path) else str(target)

    def _write(self, target: Path | str, options: Mapping[str, Any]) -> Path | str:
        numbered = self.project_configuration.automatic_checkpoint_naming
        alone = self._saves_alone(target)
        if self.is_main_process or not alone:
            target = super().save_state(None if numbered else target, alone=alone, **options)
        else:
            self._refuse_unapplied()
            series = self.run.checkpoints.series
            number = series.next_number
            if numbered and isinstance(target, Path):
                number = max(number, self._newest_there + 1)
                target = target.with_name(f"checkpoint_{number}")
            series.number_from(number + 1)
        if alone and isinstance(target, Path):
            _rank_states.write(self.run, target)
        _logger.info("All states saved in %s", target)
        return target

    def _note_numbers(self) -> None:
        """Note which checkpoint of the project the main process finds. Collective.

        It goes on with the number after that, where processes save without a word between them.
        """
        project = self.run.config.project
        if self.run.world.size > 1 and project.automatic_checkpoint_naming:
            folder, names = _place(f"{project.project_dir or '.'}/checkpoints"), []
            if self.is_main_process and isinstance(folder, Path) and folder.is_dir():
                names = os.listdir(folder)
            numbers = [int(name[11:]) for name in names if re.fullmatch(r"checkpoint_(0|[1-9]\d*)", name)]
            control = self.run.collectives("control")
            self._newest_there = control.broadcast_object(max(numbers, default=-1))

    def _refuse_unapplied(self) -> None:
        """Raise where the main process does: it saves no gradients."""
        waiting = [unit.name for unit in self.run.units if unit.pending or not unit.window.boundary]
        if waiting:
            raise CheckpointError(
                f"save_state: on rank {self.process_index} unit {waiting[0]!r} has gradients that no"
                " optimizer has applied, and gradients are not saved\n"
                "save after optimizer.step(), or drop them first with optimizer.zero_grad()"
            )

    def _saves_alone(self, where: Path | str) -> bool:
        """Return whether the main process can write alone, as each rank has all state.

        Not to a URL: beside it no rank can leave a file. Nor where checkpoints are copied to one.
        """
        config = self.run.config
        return (
            isinstance(where, Path)
            and not self._is_copied
            and self.run.world.size > 1
            and self.distributed_type not in self._divided
            and self.run.mesh is None
            and all(unit.mesh is None for unit in self.run.units)
            and not config.project.save_on_each_node
            and not config.data.use_stateful_dataloader
        )

    @property
    def _is_copied(self) -> bool:
        """True if the extension `mirror` copies checkpoints: it copies those that all ranks saved."""
        return "mirror" in self.run.plugins

    def _target(self, output_dir: str | os.PathLike[str] | None) -> Path | str:
        project = self.project_configuration
        if project.automatic_checkpoint_naming:  # then a folder that is given means nothing, as there
            return _place(f"{project.project_dir or '.'}/checkpoints/checkpoint_{project.iteration}")
        if output_dir is None:
            raise NoStateError(
                "No output_dir provided and automatic checkpoint naming is disabled.\n"
                "call accelerator.save_state('path/of/the/checkpoint')"
            )
        return _place(output_dir)

    def _tell_the_run(self) -> None:
        """Give the run the program's `project_configuration`, assigned or edited."""
        project, run = self.project_configuration, self.run
        run.reconfigure(project=project.to_ours())
        run.checkpoints.series.number_from(project.iteration)

    # -- hooks -------------------------------------------------------------------------------------

    @contextmanager
    def _hooked(self, target: Path | str) -> Iterator[Path | None]:
        """Run save hooks; yield their folder.

        Inside, models whose weights the hooks took are left out of saved states. Yields None without hooks.
        """
        if not self._save_model_state_pre_hook:
            yield None
            return
        self._refuse_hooks_with_copies()
        target = _folder_for_hooks(target)
        models = [] if self.distributed_type in self._divided else list(self._models)
        weights = [model.state_dict() for model in models]
        known = [(each, list(each.items())) for each in weights]
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.hooks-", dir=target.parent) as folder:
            made = Path(folder, target.name)
            made.mkdir()
            for hook in self._save_model_state_pre_hook.values():
                hook(self._models, weights, str(made))
            _refuse_changed(known, weights)
            taken = [
                model
                for model, (given, _) in zip(models, known, strict=True)
                if not any(given is left for left in weights)
            ]
            self.run.keep_apart([*self._apart, *taken])
            try:
                yield made
            finally:
                self.run.keep_apart(self._apart)

    def _refuse_hooks_with_copies(self) -> None:
        if self._is_copied:
            raise NotServedError(
                "hooks of saved states write and read local files, and the extension mirror copies"
                " checkpoints without these\nremove the hooks, or the extension"
            )

    def _deliver(self, made: Path, target: Path) -> None:
        """Move what hooks wrote on this rank into the checkpoint, once it has its name."""
        if self._saves_alone(target) and not self.is_main_process:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while not _rank_states.same_moment(self.run, target, 0):
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"save_state: a hook wrote files on rank {self.process_index}, and the main process"
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

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Restore it. Collective."""
        options = _options_of_load(load_kwargs, load_model_func_kwargs)
        self._tell_the_run()
        project = self.project_configuration
        if input_dir is None and not project.automatic_checkpoint_naming:
            raise NoStateError("No input_dir provided and automatic checkpoint naming is disabled.")
        self.wait_for_everyone()  # the main process may still be writing it
        place = _place(f"{project.project_dir or '.'}/checkpoints" if input_dir is None else input_dir)
        if input_dir is None and self._load_model_state_pre_hook:
            self._refuse_hooks_with_copies()
            input_dir = _newest(_folder_for_hooks(place))
            place = _place(input_dir or place)
        _logger.info("Loading states from %s", input_dir)
        models = [] if self.distributed_type in self._divided else list(self._models)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, str(input_dir))
        if self.distributed_type not in self._divided:
            taken = [model for model in self._models if not any(model is each for each in models)]
            self.run.keep_apart([*self._apart, *taken])
        try:
            with _rank_states.told_here(self._saves_alone(place)):
                loaded = _place(str(super().load_state(input_dir, **options)))
        except CheckpointError as error:
            if isinstance(place, str) or (input_dir is None and self._is_copied):
                raise
            if input_dir is not None and place.is_dir():
                is_checkpoint = accel_core.commits(accel_core.storage_at(place))
                if not is_checkpoint and any(place.glob("random_states_*.pkl")):
                    raise NoStateError(_SAVED_THERE.format(place), path=str(place)) from error
                raise
            text = f"Tried to find {input_dir} but folder does not exist\n{error}"
            raise NoStateError(text, path=str(input_dir)) from error
        finally:
            self.run.keep_apart(self._apart)
        manifest = accel_core.read_manifest(accel_core.storage_at(loaded))
        self._count = int(manifest.members["step"] or 0)
        project.iteration = self.run.checkpoints.series.next_number
        self._note_numbers()
        is_whole = manifest.world["size"] == self.run.world.size  # with each rank's streams, as core saves it
        if self._saves_alone(loaded) and isinstance(loaded, Path) and not is_whole:
            _rank_states.read(self.run, loaded)
        _logger.info("All states loaded from %s", loaded)


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


def _refuse_changed(known: Sequence[tuple[Any, Any]], weights: Sequence[Any]) -> None:
    for left in weights:
        before = next((items for given, items in known if given is left), None)
        same = before is not None and len(before) == len(left)
        if not same or any(left.get(name) is not tensor for name, tensor in before or ()):
            raise NotServedError(
                "a save hook changed weights: the state of the prepared models is written as it is\n"
                "take the weights out of the list (weights.pop()), and write others into output_dir"
            )


def _newest(folder: Path) -> str | None:
    numbered = [each for each in folder.glob("checkpoint_*") if each.name.rpartition("_")[2].isdigit()]
    return str(max(numbered, key=lambda each: int(each.name.rpartition("_")[2]), default="")) or None


def _taken(given: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: given.pop(name) for name in names if name in given}


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


def _registered(table: Hooks, hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(table)
    table[handle.id] = hook
    return handle
