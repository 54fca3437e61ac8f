"""The Accelerator that users hold: one method per operation of the run that it owns."""

from __future__ import annotations

import gc
import inspect
import operator
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

from accel_core.accelerator.checkpointing import States
from accel_core.accelerator.processes import Ranks
from accel_core.accelerator.training import Training
from accel_core.config.parallelism import ParallelismConfig, dimensions
from accel_core.contract.arguments import quoted
from accel_core.contract.config import DataLoaderConfiguration
from accel_core.contract.options import options_of
from accel_core.errors import ConfigError
from accel_core.plugins.discovery import discover
from accel_core.runtime.run import Run
from accel_core.runtime.tracking import split_trackers
from accel_core.training.accumulation import Accumulation

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.config import (
        GradientAccumulationPlugin,
        ProfileKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from accel_core.data.loader import PreparedLoader
    from accel_core.runtime.tracking import GeneralTracker
    from accel_core.training.proxies import PreparedOptimizer, PreparedScheduler


class Accelerator(Ranks, Training, States):
    """Run an ordinary training loop on the chosen devices and strategy.

    All ranks must create it. Arguments override the config file. An argument that contradicts a flag or an
    environment variable is an error. None means "not set".

    Args:
        device_placement: move prepared models and batches to the device.
        split_batches: split each batch between processes, instead of giving each process its own batch.
        mixed_precision: "no", "fp16", "bf16", the name of a precision plugin, or a word such as "fp8" that
            several precision plugins may provide.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: the same as `device="cpu"`.
        dataloader_config: how prepared dataloaders divide data between processes.
        rng_types: random number generators to synchronize across ranks at the start of each epoch. The
            "generator" of a prepared loader is synchronized in any case.
        log_with: trackers: names of plugins, "all" for every installed tracker, or GeneralTracker objects.
        project_dir: folder for checkpoints and logs.
        project_config: more options of that folder.
        gradient_accumulation_plugin: more options of gradient accumulation.
        step_scheduler_with_optimizer: schedulers step once per applied optimizer step. False: the inner
            scheduler steps at each call.
        kwargs_handlers: config objects; the class of an object selects the section that it configures.
        dynamo_backend: backend of `torch.compile`.
        dynamo_plugin: more options of compilation.
        device: a device plugin or a torch device type.
        strategy: a strategy plugin, or a name from `strategies` of the config.
        parallelism_config: number of ranks along each dimension, such as `ParallelismConfig(tp=2)`.
        strategies: name -> `plugin` and its options, or a config object. `prepare(..., strategy=name)`
            selects a strategy by this name.
        plugins: config objects, as kwargs_handlers. The object of a strategy or an extension also selects
            that plugin.
        presets: dotted path -> (value, its origin), for programs with settings of their own. A file, a
            variable, a flag or an argument overrides a preset.

    Raises:
        ConfigError: a setting is unknown, contradictory, or impossible on this machine.
        PluginError: a plugin that the settings name cannot be used.
    """

    _run_type: ClassVar[type[Run]] = Run
    """Class of the run that an Accelerator makes. A subclass of Accelerator may have a class of its own."""

    def __init__(
        self,
        device_placement: bool | None = None,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        rng_types: Sequence[str] | None = None,
        log_with: str | GeneralTracker | Sequence[str | GeneralTracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool | None = None,
        kwargs_handlers: Sequence[object] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        *,
        device: str | None = None,
        strategy: str | None = None,
        parallelism_config: ParallelismConfig | None = None,
        strategies: Mapping[str, object] | None = None,
        plugins: Sequence[object] = (),
        presets: Mapping[str, tuple[object, str]] | None = None,
    ) -> None:
        if cpu and device not in (None, "cpu"):
            raise ConfigError(
                f"Accelerator(cpu=True, device={quoted(device)}) contradict each other\ngive one of them"
            )
        log_with, own_trackers = split_trackers(log_with)
        settings = {
            "device": "cpu" if cpu else device,
            "device_placement": device_placement,
            "compile.backend": dynamo_backend,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "log_with": log_with,
            "mixed_precision": mixed_precision,
            "project.project_dir": project_dir,
            "rng_types": rng_types,
            "data.split_batches": split_batches,
            "step_scheduler_with_optimizer": step_scheduler_with_optimizer,
            "strategy": strategy,
            "strategies": strategies,
            "parallelism": parallelism_config,
        }
        python = {path: value for path, value in settings.items() if value is not None}
        sections = (dataloader_config, project_config, gradient_accumulation_plugin, dynamo_plugin)
        more = (*(kwargs_handlers or ()), *plugins)
        objects = [thing for thing in (*sections, *more) if thing is not None]
        self.run = self._run_type(python=python, objects=objects, trackers=own_trackers, presets=presets)
        self._accumulations: dict[tuple[nn.Module, ...], Accumulation] = {}
        self._triggered = False

    def __setattr__(self, name: str, value: Any) -> None:
        # Subclasses may define attributes by any name, so they are not checked.
        if name in _GIVEN_WHEN_MADE and type(self) is Accelerator and not hasattr(Accelerator, name):
            given = f"{name}=..."
            if name not in _ARGUMENTS:
                given = f"dataloader_config=DataLoaderConfiguration({given})"
            raise ConfigError(
                f"accelerator.{name} = ... changes nothing: settings are read when the Accelerator is made\n"
                f"give it there: Accelerator({given})"
            )
        super().__setattr__(name, value)

    # -- settings --------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """The configured precision: "no", "fp16", "bf16", ..."""
        return self.run.config.mixed_precision

    @cached_property
    def parallelism_config(self) -> ParallelismConfig:
        """The number of ranks along each dimension, with -1 replaced by the ranks that were left."""
        mesh, sizes = self.run.mesh, self.run.config.parallelism
        if mesh is None:
            return ParallelismConfig(**dict.fromkeys(sizes, 1))
        names = dimensions(discover()).keys() & set(mesh.names())
        # A strategy may divide ranks along a dimension that its mesh does not have.
        return ParallelismConfig(**{**sizes, **{name: mesh.total(name) for name in sorted(names)}})

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per window. Settable: a new value applies to each unit from its next window on."""
        return self.run.accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if steps < 1:
            raise ConfigError(f"gradient_accumulation_steps is {steps}\nset it to 1 or more")
        self.run.set_accumulation_steps(operator.index(steps))

    @property
    def scheduler_steps(self) -> int:
        """Scheduler steps per optimizer step. Subclasses that step schedulers differently override it."""
        return 1

    @property
    def project_dir(self) -> str | None:
        """The project's folder, or None."""
        return self.run.config.project.project_dir

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The resolved options of the folders that this run writes to."""
        return self.run.config.project

    @property
    def logging_dir(self) -> str | None:
        """The folder for logs: `logging_dir` of the project's options, else the project's folder."""
        return self.run.config.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next numbered checkpoint, unless another run has saved a higher number."""
        return self.run.checkpoints.series.next_number

    def explain(self) -> str:
        """Return text that explains this stack and its settings, a step, and an epoch."""
        from accel_core.runtime.explain import explain  # late: start-up need not wait for it

        return explain(self.run, self.scheduler_steps)

    # -- prepare ---------------------------------------------------------------------------------

    def prepare(
        self,
        *objects: Any,
        device_placement: Sequence[bool | None] | None = None,
        strategy: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Prepare models, optimizers, schedulers and dataloaders for training; return them in the same order.

        Takes any number of objects, in one call or several. None is returned as None. Call it on all ranks.
        If it raises, the failing unit is unchanged; units built before it stay prepared.

        Args:
            objects: models, optimizers, schedulers and dataloaders, in any order.
            device_placement: for each object, whether to move it to the device; None: the run's setting.
            strategy: strategy of the unit that these objects form; default: the run's.
            name: name of that unit in checkpoints and messages.

        Returns:
            The prepared object if one was passed, else a tuple.

        Raises:
            AccelError: the kind of an object is unknown, the model of an optimizer or the optimizer of a
                scheduler is not prepared, or the run has ended.
            ConfigError: the strategy, a plugin or the `data` settings do not fit these objects.
        """
        from accel_core.training.prepare import prepare  # late: start-up need not wait for it

        prepared = prepare(
            self.run,
            objects,
            strategy=strategy,
            name=name,
            placement=device_placement,
            scheduler_steps=self.scheduler_steps,
        )
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def model_init_context(
        self, *, strategy: str | None = None, name: str | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which to build a model that is too large to build whole.

        The strategy decides how weights are made inside: on the meta device, or in parts. Call `prepare` on
        the model afterwards. Collective.

        Args:
            strategy: strategy of the unit that the model will be prepared for; default: the run's.
            name: name of that unit.
        """
        context: AbstractContextManager[Any] = self.run.hooks_of(strategy, name).model_init_context(name)
        return context

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; in evaluation mode, move it to the device without wrapping it."""
        places = None if device_placement is None else [device_placement]
        strategy = "single" if evaluation_mode else None  # `single` moves models and wraps nothing
        prepared: nn.Module = self.prepare(model, device_placement=places, strategy=strategy)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Prepare one optimizer, whose model is prepared."""
        prepared: PreparedOptimizer = self.prepare(optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare one scheduler, whose optimizer is prepared."""
        prepared: PreparedScheduler = self.prepare(scheduler)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        *,
        already_sharded: bool | None = None,
    ) -> PreparedLoader:
        """Prepare one dataloader.

        Args:
            data_loader: a DataLoader, or a loader of a library that a plugin knows.
            device_placement: whether batches are moved to the device; None: the run's setting.
            already_sharded: whether each process's loader has its own part of the data; None: the option
                `data.already_sharded`.
        """
        places = None if device_placement is None else [device_placement]
        prepared: PreparedLoader
        if already_sharded is None:
            prepared = self.prepare(data_loader, device_placement=places)
        else:
            from accel_core.training.prepare import prepare  # late: start-up need not wait for it

            (prepared,) = prepare(self.run, [data_loader], placement=places, already_sharded=already_sharded)
        return prepared

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own module inside a prepared model.

        A model that was not prepared is returned unchanged.

        Args:
            model: a prepared model or the model passed to `prepare`; a copy of a prepared model; or
                `torch.compile` of these. Works after `free_memory` too, except for copies.
            keep_fp32_wrapper: False returns a view that shares the module's tensors, without autocast.
            keep_torch_compile: False returns a view that shares the module's tensors and runs eagerly.
        """
        from accel_core.training.unwrap import unwrap_model  # late: start-up need not wait for it

        return unwrap_model(
            self.run, model, keep_contexts=keep_fp32_wrapper, keep_compiled=keep_torch_compile
        )

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the dataloader without its first `num_batches` batches, for its next epoch only."""
        from accel_core.data.skipping import skip_first_batches  # late: start-up need not wait for it

        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects and release device memory; return as many None as arguments.

        `model, optimizer = accelerator.free_memory(model, optimizer)` drops the caller's references too.
        Get whole weights (`get_state_dict`) before: afterwards each rank has only its parts of a sharded
        model.
        """
        from accel_core.accelerator.memory import empty_cache  # late: start-up need not wait for it

        run = self.run
        run.release_units()
        run.prepared.forget()
        run.registered.clear()
        run.trained_from.clear()
        run.checkpoints.free_memory()
        self._accumulations.clear()
        # Sharded and compiled models form reference cycles, which Python would collect much later.
        gc.collect()
        empty_cache(run)
        return [None] * len(objects)

    clear = free_memory

    # -- trackers and profiler -------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open the project in each tracker of `log_with`.

        Call it on every rank, or on the main process only.

        Args:
            project_name: name under which trackers store the logged values.
            config: settings to store with it: a mapping, nested or not, or an object with attributes.
            init_kwargs: tracker's name -> options of that tracker.

        Raises:
            AccelError: the trackers have already started.
            ConfigError: `init_kwargs` names a tracker that this run does not have.
        """
        self.run.trackers.start(project_name, {} if config is None else config, init_kwargs or {})

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values to each tracker, on the main process.

        Calls on other ranks do nothing. Not collective.

        Args:
            values: name -> value; may be nested. Tensors of one element are logged as numbers.
            step: the number of the training step.
            log_kwargs: tracker's name -> more arguments for that tracker.

        Raises:
            AccelError: `init_trackers` was not called.
            ConfigError: `log_kwargs` names a tracker that this run does not have.
        """
        self.run.trackers.log(values, step, log_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker, or with `unwrap` the object that it wraps, to log values such as images.

        If the tracker does not log on this rank, returns an object that accepts every call and does nothing.

        Raises:
            AccelError: `init_trackers` was not called.
            ConfigError: this run has no such tracker.
        """
        return self.run.trackers.get(name, unwrap=unwrap)

    @property
    def trackers(self) -> list[Any]:
        """The trackers that log on this rank; empty before `init_trackers`."""
        return self.run.trackers.started

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Record the code inside with torch's profiler, which the context returns. Not collective.

        With `output_trace_dir` each rank writes its trace into that folder, as profile_RANK.json.

        Args:
            profile_handler: options; default: the ProfileKwargs passed to Accelerator, or section `profile`.

        Raises:
            ConfigError: torch cannot record an activity of `activities` on this machine.
        """
        from accel_core.accelerator.profiler import profiling  # late: start-up need not wait for it

        return profiling(self.run, self.run.config.profile if profile_handler is None else profile_handler)

    # -- the end ---------------------------------------------------------------------------------

    def end_training(self) -> None:
        """End the run and release its resources; the run cannot train or communicate afterwards.

        Collective. A second call does nothing.

        Raises:
            CheckpointError: a save that was still being written has failed.
        """
        self.run.end()

    def __reduce__(self) -> Any:
        return self.run.__reduce__()

    def __repr__(self) -> str:
        world = self.run.world
        return f"Accelerator({self.run.stack}, rank {world.rank} of {world.size} on {self.device})"


_ARGUMENTS: Final = frozenset(inspect.signature(Accelerator).parameters)
_GIVEN_WHEN_MADE: Final = _ARGUMENTS.union(options_of(DataLoaderConfiguration))
"""Names of settings. Assigning an attribute by such a name changes nothing, unless it is a property."""
