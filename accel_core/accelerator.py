"""The object users hold. Thin: each method a line or a few over the run it owns."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from accel_core import ops, step
from accel_core.data.loader import PreparedLoader
from accel_core.data.skipping import skip_first_batches
from accel_core.errors import AccelError, CheckpointError, ConfigError
from accel_core.explaining import explain
from accel_core.native.precision import autocast
from accel_core.prepare import prepare
from accel_core.profiling import profiling
from accel_core.run import Run
from accel_core.saving import save as write_object
from accel_core.step import Accumulation
from accel_core.tracking import sort_out

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from accel_core.config.schema import (
        AutocastKwargs,
        DataLoaderConfiguration,
        GradientAccumulationPlugin,
        ProfileKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from accel_core.hookspecs import StepOutput
    from accel_core.proxies import PreparedOptimizer, PreparedScheduler
    from accel_core.tracking import GeneralTracker
    from accel_core.unit import Unit, Window

__all__ = ["Accelerator"]

P = ParamSpec("P")
R = TypeVar("R")


class Accelerator:
    """Runs an ordinary training loop on the devices and under the strategy that were chosen.

    What is given here wins over the config file; what contradicts a flag or an environment
    variable is an error. An argument left at its default says nothing.

    Args:
        device_placement: move prepared models and batches to the device.
        split_batches: share each batch out, instead of a batch for each process.
        mixed_precision: "no", "fp16", "bf16", or the name of a precision plugin.
        gradient_accumulation_steps: micro-batches of one optimizer step.
        cpu: the same as `device="cpu"`.
        dataloader_config: how prepared dataloaders share out the data.
        rng_types: random streams that ranks share at the start of each epoch.
        log_with: trackers: names of plugins, "all" that are installed, GeneralTrackers of one's own.
        project_dir: folder for checkpoints and logs.
        project_config: more about that folder.
        gradient_accumulation_plugin: more about accumulation.
        step_scheduler_with_optimizer: schedulers step once per applied optimizer step; False leaves
            them to the user.
        kwargs_handlers: config objects; the class of each tells what it configures.
        dynamo_backend: backend of `torch.compile`.
        dynamo_plugin: more about compilation.
        device: a device plugin or a torch device type.
        strategy: a strategy plugin, or a name from `strategies` of the config.
        plugins: config objects, as kwargs_handlers; that of a strategy or an extension chooses it.

    Raises:
        ConfigError: what was asked is unknown, contradictory, or cannot be on this machine.
        PluginError: a plugin that was asked for cannot be used.

    All ranks of the world must make it.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        rng_types: Sequence[str] | None = None,
        log_with: str | GeneralTracker | Sequence[str | GeneralTracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[object] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        *,
        device: str | None = None,
        strategy: str | None = None,
        plugins: Sequence[object] = (),
    ) -> None:
        if cpu and device not in (None, "cpu"):
            raise ConfigError(
                f"Accelerator(cpu=True, device={device!r}) contradict each other; give one of them"
            )
        tracker_names, own_trackers = sort_out(log_with)
        given = {
            "device_placement": None if device_placement else False,
            "data.split_batches": split_batches or None,
            "mixed_precision": mixed_precision,
            "gradient_accumulation_steps": None
            if gradient_accumulation_steps == 1
            else gradient_accumulation_steps,
            "device": "cpu" if cpu else device,
            "strategy": strategy,
            "rng_types": rng_types,
            "log_with": tracker_names,
            "project.project_dir": project_dir,
            "step_scheduler_with_optimizer": None if step_scheduler_with_optimizer else False,
            "compile.backend": dynamo_backend,
        }
        sections = (dataloader_config, project_config, gradient_accumulation_plugin, dynamo_plugin)
        objects = [thing for thing in (*sections, *(kwargs_handlers or ()), *plugins) if thing is not None]
        python = {path: value for path, value in given.items() if value is not None}
        self.run = Run(python=python, objects=objects, trackers=own_trackers)
        self._accumulations: dict[tuple[nn.Module, ...], Accumulation] = {}
        self._triggered = False

    # -- who and where ---------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.run.device

    @property
    def num_processes(self) -> int:
        """World size."""
        return self.run.world.size

    @property
    def process_index(self) -> int:
        """Rank in the world."""
        return self.run.world.rank

    @property
    def local_process_index(self) -> int:
        """Rank on this node."""
        return self.run.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """True on one rank of the world."""
        return self.run.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on one rank of each node."""
        return self.run.world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """True on the last rank of the world."""
        return self.run.world.rank == self.run.world.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.run.world.size > 1

    @property
    def distributed_type(self) -> str:
        """The strategy's own word for itself, else the device's."""
        stack = self.run.stack
        return (
            stack.strategy.card.distributed_type or stack.device.card.distributed_type or stack.strategy.name
        )

    @property
    def mixed_precision(self) -> str:
        """What was asked for: "no", "fp16", "bf16", ..."""
        return self.run.config.mixed_precision

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a window. Settable: for every unit, from its next window on."""
        return self.run.accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if steps < 1:
            raise ConfigError(f"gradient_accumulation_steps must be at least 1, got {steps}")
        self.run.accumulation_steps = steps
        for unit in self.run.units:
            unit.window.size = steps

    @property
    def project_dir(self) -> str | None:
        """The project's folder."""
        return self.run.config.project.project_dir

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where this run writes, as it was resolved."""
        return self.run.config.project

    @property
    def logging_dir(self) -> str | None:
        """The folder of logs: the project's, if no other was given."""
        return self.run.config.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next saved state."""
        return self.run.iteration

    def explain(self) -> str:
        """Why this stack runs with these settings, and what a step and an epoch are, in words."""
        return explain(self.run)

    # -- prepare ---------------------------------------------------------------------------------

    def prepare(
        self,
        *objects: Any,
        device_placement: Sequence[bool] | None = None,
        strategy: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Models, optimizers, schedulers and dataloaders, ready to train; in the order given.

        In any mix and number, in one call or several; None passes. Collective.

        Args:
            objects: what to prepare.
            device_placement: for each object, whether to move it to the device.
            strategy: of the unit these objects make; default: the run's.
            name: of that unit, in checkpoints and messages.
        """
        prepared = prepare(self.run, objects, strategy=strategy, name=name, placement=device_placement)
        self._accumulations.clear()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def model_init_context(
        self, *, strategy: str | None = None, name: str | None = None
    ) -> AbstractContextManager[Any]:
        """A context in which to build a model too large to be built whole; `prepare` it afterwards.

        What is done there is the strategy's business: weights on the meta device, or in parts. Collective.

        Args:
            strategy: of the unit that the model will be prepared for; default: the run's.
            name: of that unit.
        """
        context: AbstractContextManager[Any] = self.run.make_unit(name, strategy).hooks.model_init_context(
            name
        )
        return context

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """`prepare` for one model; in evaluation mode it is placed, not wrapped for training."""
        places = None if device_placement is None else [device_placement]
        strategy = "single" if evaluation_mode else None
        prepared: nn.Module = self.prepare(model, device_placement=places, strategy=strategy)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """`prepare` for one optimizer, of a model that is prepared."""
        prepared: PreparedOptimizer = self.prepare(optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """`prepare` for one scheduler, of an optimizer that is prepared."""
        prepared: PreparedScheduler = self.prepare(scheduler)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> PreparedLoader:
        """`prepare` for one dataloader."""
        places = None if device_placement is None else [device_placement]
        prepared: PreparedLoader = self.prepare(data_loader, device_placement=places)
        return prepared

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module inside what `prepare` returned.

        `keep_fp32_wrapper` is accepted and without meaning here: forward is never replaced.
        """
        unit = self.run.unit_of_model(model)
        if unit is None:
            return model
        inner: nn.Module = unit.hooks.unwrap_model(unit, model, keep_torch_compile)
        return inner

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects and give device memory back; as many None as arguments.

        `model, optimizer = accelerator.free_memory(model, optimizer)` drops the caller's names too.
        """
        run = self.run
        run.release_units()
        for held in (run.units, run.trained, run.optimizers, run.loaders, run.registered):
            held.clear()
        run.homes.forget()
        self._accumulations.clear()
        run.hooks.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    # -- the step --------------------------------------------------------------------------------

    @property
    def window(self) -> Window:
        """The window of the innermost `accumulate`, or of the last one."""
        return self.run.window

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is its window's last. Settable."""
        return self.run.window.boundary

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        for unit in self.run.units:
            unit.window.boundary = value
        self.run.window.boundary = value

    def accumulate(
        self, *models: nn.Module, items: Tensor | float | None = None, batch: Any = None
    ) -> Accumulation:
        """The context of one micro-batch of the windows of these models' units (default: of all).

        Inside, `backward` divides the loss by the window's size, and `step`, `zero_grad`, clipping
        and schedulers act at the window's boundary only: its last micro-batch, or the loader's.

        Args:
            models: prepared.
            items: of this micro-batch on this rank, such as its tokens that count. The loss is then
                their *sum*, and the gradients at the boundary are divided by the items of the whole
                window on all ranks: exact for batches of any lengths, short last windows included.
            batch: the micro-batch, for extensions that work around its forward and backward.
        """
        found = self._accumulations.get(models)
        if found is None:
            self.run.require_alive()
            units = self._units(models) if models else list(self.run.units)
            found = self._accumulations[models] = Accumulation(self.run, units, models)
        found.items, found.batch = items, batch
        return found

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which this model's forward and backward do not reduce gradients."""
        (unit,) = self._units([model])
        return step.quiet(unit, [model])

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The stack's autocast, for what is computed outside a prepared model's forward.

        `autocast_handler`: other settings than the run's, within the context.
        """
        return autocast(self.run, autocast_handler)

    def backward(self, loss: Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """Gradients of `loss` (0-dim). Inside `accumulate` it is divided by the window's size,
        unless it was given the micro-batch's items.

        Args:
            loss: from the forward of prepared models.
            model: whose loss this is; needed only where several strategies do their own backward.
            options: for torch: retain_graph, create_graph, inputs.

        Raises:
            AccelError: the loss requires no gradient, or `model` is needed.
        """
        step.backward(self.run, loss, None if model is None else self._units([model])[0], options)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip the parameters' gradients, after unscaling, to exactly this norm, over all ranks.

        Returns the total norm before clipping (0-dim), or None inside a window.
        """
        unit, mine = self._owner(parameters)
        return step.clip_norm(unit, mine, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp each gradient to [-clip_value, clip_value], after unscaling; nothing inside a window."""
        unit, mine = self._owner(parameters)
        step.clip_value(unit, mine, clip_value)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide gradients by the loss scale now, to look at or change them before the step."""
        chosen = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for unit in self.run.trained:
            mine = [proxy for _, proxy in self.run.optimizers if proxy.unit is unit]
            if unit.window.boundary and (optimizer is None or any(proxy in chosen for proxy in mine)):
                step.unscale(unit)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer skipped its last step (overflow under a loss scale)."""
        return any(proxy.step_was_skipped for _, proxy in self.run.optimizers)

    def forward_backward(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        forward_loss: Callable[[nn.Module, Any], tuple[Tensor, Any]],
        *,
        microbatches: int | None = None,
        forward_only: bool = False,
    ) -> StepOutput:
        """Forward and backward of one window; the only form where the strategy owns the schedule.

        Args:
            model: prepared.
            batches: `microbatches` of them are taken.
            forward_loss: (model, batch) -> (0-dim loss, anything).
            microbatches: default: the run's gradient_accumulation_steps.
            forward_only: no backward, for evaluation.
        """
        (unit,) = self._units([model])
        unit.window.items = None
        count = microbatches or unit.window.size
        self.run.window = unit.window
        output: StepOutput = unit.steps.forward_backward(
            unit, iter(batches), forward_loss, count, forward_only
        )
        if not forward_only:  # as after the window's last `backward`: its gradients wait for a step
            unit.window.fresh = unit.reduced = False
            unit.unscaled.clear()
            unit.waiting.update(unit.optimizers)
        return output

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> Iterator[None]:
        """A context in which ranks may run out of batches at different times.

        `even_batches`: what prepared loaders of map-style data do inside, instead of what is configured.
        """
        units = self._units(joinables)
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in self.run.loaders:
                    stack.enter_context(loader.dealing(even=even_batches))
            stack.enter_context(units[0].hooks.join(units, even_batches))
            for unit in units:
                unit.joined = True
                stack.callback(setattr, unit, "joined", False)
            yield

    # -- collectives -----------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate each tensor of a nested structure over all ranks, along dim 0. Collective."""
        return ops.gather(tensor, run=self.run)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without the samples that only padded the last batch. Collective."""
        return ops.gather_for_metrics(input_data, use_gather_object=use_gather_object, run=self.run)

    def reduce(self, tensor: Any, reduction: ops.Reduction = "sum", scale: float = 1.0) -> Any:
        """Reduce each tensor of a nested structure over all ranks ("sum", "mean" or "none"). Collective."""
        return ops.reduce(tensor, reduction, scale, run=self.run)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Each tensor of a nested structure as rank `from_process` has it. Collective."""
        return ops.broadcast(tensor, from_process, run=self.run)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad each tensor of a nested structure to the longest on any rank, along `dim`. Collective."""
        return ops.pad_across_processes(tensor, dim, pad_index, pad_first, run=self.run)

    def wait_for_everyone(self) -> None:
        """Return once every rank is here. Collective."""
        ops.wait_for_everyone(run=self.run)

    def set_trigger(self) -> None:
        """Make the next `check_trigger` true on every rank. On any rank, at any time."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any rank called `set_trigger` since the last check. Collective."""
        flag = torch.tensor([int(self._triggered)])
        self._triggered = False
        return bool(self.run.collectives("control").all_reduce(flag, "max").item())

    # -- trackers and profiler -------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open the project in each tracker of `log_with`. On every rank, or on the main process only.

        Args:
            project_name: under which trackers keep what is logged.
            config: settings to keep with it, nested if you like.
            init_kwargs: tracker's name -> what that tracker is to be given.
        """
        self.run.trackers.start(project_name, config or {}, init_kwargs or {})

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values to each tracker, on the main process. `log_kwargs`: more for each, by name.

        Raises:
            AccelError: `init_trackers` was not called.
        """
        self.run.trackers.log(values, step, log_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker, or with `unwrap` what it wraps: for what `log` cannot say, such as images.

        On ranks where it does not log: something that takes every call and does nothing.
        """
        return self.run.trackers.get(name, unwrap=unwrap)

    @property
    def trackers(self) -> list[Any]:
        """The trackers that log on this rank; none before `init_trackers`."""
        return self.run.trackers.started

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """A context that records what happens inside by torch's profiler, which it gives.

        With `output_trace_dir` each rank leaves its trace there, as profile_RANK.json.

        profile_handler: how; default: the ProfileKwargs given to Accelerator, or section `profile`.
        """
        return profiling(self.run, profile_handler or self.run.config.profile)

    # -- rank-aware running ----------------------------------------------------------------------

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, on the main process only."""
        if self.is_main_process:
            print(*values, **options)  # noqa: T201  the method's purpose

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the block first, then all others. Collective."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first process of each node runs the block first, then the others. Collective."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, mine: bool) -> Iterator[None]:
        if not mine:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if mine:
                self.wait_for_everyone()

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorator: run on the main process only; elsewhere the call gives None."""
        return _only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorator: run on the first process of each node only."""
        return _only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorator: run on the last process only."""
        return _only(function, lambda: self.is_last_process)

    def on_process(self, function: Callable[P, R] | None = None, process_index: int = 0) -> Any:
        """Decorator: run on the process of that rank only."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only(function, lambda: self.process_index == process_index)

    def on_local_process(self, function: Callable[P, R] | None = None, local_process_index: int = 0) -> Any:
        """Decorator: run on the process of that local rank of each node only."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _only(function, lambda: self.local_process_index == local_process_index)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """A context that gives this process its share of a list, tuple, dict of these, or tensor."""
        return ops.split_between_processes(inputs, apply_padding=apply_padding, run=self.run)

    # -- state -----------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore these objects (with `state_dict` and `load_state_dict`) with the state."""
        unable = [
            thing
            for thing in objects
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"))
        ]
        if unable:
            raise CheckpointError(
                f"register_for_checkpointing: {type(unable[0]).__name__} cannot be saved and restored\n"
                "give it state_dict and load_state_dict, returning and taking plain data and tensors"
            )
        self.run.registered.extend(objects)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        wait: bool = True,
    ) -> Path:
        """Write everything that training needs to go on into `output_dir`, atomically. Collective.

        Without a directory, under `automatic_checkpoint_naming`, it is `checkpoints/checkpoint_N` in the
        project's folder, and the oldest are removed down to `total_limit`, once the new one is complete.
        `step` is noted for people. A checkpoint that is there is replaced; any other folder is refused.
        With `wait=False` training stops only while the state is copied, and a thread writes the copy
        (kept for the next save); one save at a time: the next waits for it, and raises what went wrong,
        as do `wait_for_checkpoint` and `end_training`. Returns the directory.
        """
        from accel_core.checkpoint.save import save  # late: start-up need not wait for it

        return save(self.run, self._checkpoint_directory(output_dir, "save_state"), step=step, wait=wait)

    def wait_for_checkpoint(self) -> None:
        """Return once the last `save_state(..., wait=False)` is on the disk of all ranks.

        Raises:
            CheckpointError: it failed, on some rank; what was there before is unchanged.
        """
        if self.run.saver is not None:
            self.run.saver.settle()

    def save_on_preemption(
        self, output_dir: str | os.PathLike[str] | None = None, *, step: int | None = None
    ) -> bool:
        """Whether this job was told to stop (SIGTERM, on any rank); if so, its state is saved. Collective.

        Call it on all ranks after each step, and leave the loops when it is true. The first call starts
        to watch; a call costs no communication until then, and all ranks stop after the same step.
        Inside an accumulation window it is False. Arguments as of `save_state`.
        """
        from accel_core.checkpoint.preemption import Preemption  # late: start-up need not wait for it

        run = self.run
        if run.preemption is None:
            run.require_alive()
            run.preemption = Preemption(run)
        if not all(unit.window.boundary for unit in run.units) or not run.preemption.due():
            return False
        self.save_state(output_dir, step=step)
        return True

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        missing_ok: bool = False,
    ) -> Path | None:
        """Restore what `save_state` wrote, into the objects prepared so far. Collective.

        In a world of another size weights, optimizers and data go on exactly; random streams start
        anew, from a seed derived from the checkpoint's.

        Args:
            input_dir: what was given to `save_state`. Without it, under `automatic_checkpoint_naming`,
                the newest one that is valid; damaged ones are logged and passed over.
            strict: refuse names that are missing, unexpected or of another shape; else leave them out.
            missing_ok: where there is no checkpoint yet, do nothing and return None.

        Returns the directory that was loaded.

        Raises:
            CheckpointError: it is damaged, incomplete, or does not fit; nothing is changed then.
        """
        from accel_core.checkpoint.load import load

        directory = self._checkpoint_directory(input_dir, "load_state")
        return load(self.run, directory, strict=strict, missing_ok=missing_ok)

    def _checkpoint_directory(self, given: str | os.PathLike[str] | None, method: str) -> Path | None:
        self.run.require_alive()
        if given is not None:
            return Path(given).expanduser()
        if not self.project_configuration.automatic_checkpoint_naming:
            raise CheckpointError(
                f"{method} needs to know where\ncall accelerator.{method}('path/of/the/checkpoint'), or set"
                " project.automatic_checkpoint_naming"
            )
        return None

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write `obj` once per machine, replacing `f` only when it is complete on disk."""
        if self._writes:
            write_object(obj, f, safe_serialization=safe_serialization)

    @property
    def _writes(self) -> bool:
        on_each_node = self.run.config.project.save_on_each_node
        return self.is_local_main_process if on_each_node else self.is_main_process

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights, whole and under its own names, for other libraries. Collective.

        The layout is that of `from_pretrained`: `model.safetensors`, or files of at most `max_shard_size`
        and `model.safetensors.index.json`; without `safe_serialization` the same by `torch.save`, as
        `pytorch_model.bin`. A weight larger than that gets a file of its own. In safetensors, tied weights
        stand once, under their first name.

        Raises:
            CheckpointError: they could not be written; an earlier save is still there.
        """
        from accel_core import weights  # late: start-up need not wait for it

        weights.save_model(
            self.run,
            model,
            save_directory,
            limit=max_shard_size,
            safe=safe_serialization,
            here=self._writes,
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's whole state by its own names, on every rank; do not write to it. Collective.

        unwrap: False gives what the wrapped model's own `state_dict` gives.
        """
        from accel_core import weights  # late: start-up need not wait for it

        return weights.state_dict(self.run, model) if unwrap else model.state_dict()

    def iter_weights(
        self, model: nn.Module, dtype: torch.dtype | None = None, to: torch.device | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, whole weight or buffer), one after the other: for models too large to be whole. Collective.

        All ranks must read it to its end, and must not write to the tensors. Tied weights come once.

        Args:
            model: prepared, or not.
            dtype: of floating-point weights; default: their own.
            to: device; default: where they cost least.
        """
        from accel_core import weights  # late: start-up need not wait for it

        return ((names[0], tensor) for names, tensor in weights.weights_of(self.run, model, dtype, to))

    def full_parameters(
        self, model: nn.Module, names: Iterable[str] | None = None, *, writeback: bool = False
    ) -> AbstractContextManager[Any]:
        """A context in which these parameters (default: all) of the model are whole. Collective.

        writeback: keep what is written to them inside.
        """
        from accel_core import weights  # late: start-up need not wait for it

        return weights.full_parameters(self.run, model, names, writeback=writeback)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The dataloader without its first batches, in its next epoch only."""
        return skip_first_batches(dataloader, num_batches)

    def end_training(self) -> None:
        """Release what the run holds; it cannot be used afterwards. Collective, idempotent."""
        self.run.end()

    def __reduce__(self) -> Any:
        return self.run.__reduce__()

    def __repr__(self) -> str:
        world = self.run.world
        return f"Accelerator({self.run.stack}, rank {world.rank} of {world.size} on {self.device})"

    # -- helpers ---------------------------------------------------------------------------------

    def _units(self, models: Iterable[nn.Module]) -> list[Unit]:
        units: list[Unit] = []
        for model in models:
            unit = self.run.unit_of_model(model)
            if unit is None:
                self.run.require_alive()
                raise AccelError(
                    f"this run has not prepared the {type(model).__name__} it was given\n"
                    "prepare it first, and use what accelerator.prepare(...) returns"
                )
            if unit not in units:
                units.append(unit)
        return units

    def _owner(self, parameters: Tensor | Iterable[Tensor]) -> tuple[Unit, list[Any]]:
        mine = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        units = self.run.homes.units_of(mine)
        if len(units) == 1:
            (unit,) = units
            if unit is not None:
                return unit, mine
        names = sorted("no unit" if each is None else each.name for each in units)
        raise AccelError(
            f"clipping: these {len(mine)} parameters belong to {', '.join(names) or 'nothing'};"
            " one call clips the parameters of one prepared model\n"
            "pass model.parameters() of a model that was prepared"
        )


def _only(function: Callable[P, R], here: Callable[[], bool]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if here() else None

    return run
