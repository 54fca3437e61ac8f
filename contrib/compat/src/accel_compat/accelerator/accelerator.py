"""Accelerator with the arguments, attributes and behaviour of Accelerate 1.15."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

import accel_core
from accel_compat import runs
from accel_compat.accelerator import checkpoints, deepspeed_engine, preparing, stepping
from accel_compat.accelerator.arguments import STATE_PLUGINS, Asked, read
from accel_compat.accelerator.following import Followers, Following
from accel_compat.accelerator.prepared import AcceleratedScheduler, steps_each_time
from accel_compat.configs.enums import DistributedType, FP8BackendType
from accel_compat.configs.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
)
from accel_compat.configs.translation import field_names, ours_of
from accel_compat.loaders.sharing import skip_first_batches
from accel_compat.modeling.wrappers import extract_model_from_parallel, save_of
from accel_compat.notices import warn_once
from accel_compat.run import AccelerateRun
from accel_compat.sharded_models import refuse_whole_states
from accel_compat.state import operations
from accel_compat.state.gradient_state import GradientState
from accel_compat.state.states import AcceleratorState, PartialState, distributed_type
from accel_compat.trackers.base import GeneralTracker
from accel_compat.trackers.registry import Registered
from accel_compat.unsupported import NotServedError
from accel_core import kind_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from accel_compat.accelerator.prepared import AcceleratedOptimizer

# Looked up once: these run in each step.
_accumulate, _backward = accel_core.Accelerator.accumulate, accel_core.Accelerator.backward
_MULTI = frozenset(kind for kind in DistributedType if kind.value.startswith("MULTI_")) - {"MULTI_CPU"}

Options = Mapping[str, Mapping[str, Any]]


def _field_of(config: str, name: str, *, is_settable: bool = False) -> Any:
    """Make a property of a field of one of an Accelerator's config objects."""

    def put(self: Any, value: Any) -> None:
        setattr(getattr(self, config), name, value)

    return property(attrgetter(f"{config}.{name}"), put if is_settable else None, doc=f"`{config}.{name}`.")


def _rank_along(dim: str) -> Any:
    def get(self: Accelerator) -> int:
        return 0 if self.run.mesh is None else self.run.mesh.index(dim)

    return property(get, doc=f"This process's rank along the mesh's dimension {dim}.")


class Accelerator(accel_core.Accelerator):
    """Drop-in Accelerator; adds `run` and accel-core's other methods."""

    run: AccelerateRun
    _run_type = AccelerateRun

    autocast_handler: AutocastKwargs | None
    ddp_handler: Any
    profile_handler: ProfileKwargs | None
    parallelism_config: Any
    dataloader_config: DataLoaderConfiguration
    rng_types: Any
    device_placement: bool
    project_configuration: Any = None  # core's is a property
    """The run's folders, a ProjectConfiguration. Settable, and so are its fields."""
    state: Any
    gradient_state: Any
    _loose: list[AcceleratedOptimizer]
    """Optimizers whose model is not prepared (yet)."""
    _stepping: list[AcceleratedScheduler]

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: Any = None,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        fp16: bool | None = None,
    ) -> None:
        if fp16 is not None and mixed_precision is None:  # as the oldest releases spelled it
            mixed_precision = "fp16" if fp16 else "no"
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if AcceleratorState._shared_state and runs.newest() is not None:
            _as_before(given)
        elif PartialState._shared_state.get("_cpu"):
            given["cpu"] = True
        asked = read(given)
        if AcceleratorState._shared_state and mixed_precision is not None:
            AcceleratorState()._check_initialized(asked.core["mixed_precision"], cpu)
        self._loose, self._stepping, self._followers = [], [], Followers()
        super().__init__(**asked.spoken())
        runs.register(self.run)
        self._keep(asked, given)
        self._record_states(asked)
        self.fp8_enabled = self.mixed_precision == "fp8"
        weakref.finalize(self, _forget, self.run).atexit = False
        self._count = 0
        self.flag_tensor = None
        self._save_model_state_pre_hook: checkpoints.Hooks = OrderedDict()
        self._load_model_state_pre_hook: checkpoints.Hooks = OrderedDict()
        checkpoints.note_numbers(self)

    def _keep(self, asked: Asked, given: dict[str, Any]) -> None:
        """Keep the program's settings, completed by those that the run found elsewhere."""
        for name, value in asked.kept.items():
            if name != "step_scheduler_with_optimizer":
                setattr(self, name, value)
        config = self.run.config
        if self.rng_types is None:
            self.rng_types = list(config.rng_types) or ["generator"]
        data = {name: getattr(config.data, name) for name in field_names(DataLoaderConfiguration)}
        if given["dataloader_config"] is None:
            self.dataloader_config = DataLoaderConfiguration(**data)
        for name, value in data.items():
            setattr(self.dataloader_config, name, value)
        self.project_configuration = given["project_config"] or ProjectConfiguration()
        for name in field_names(ProjectConfiguration):
            setattr(self.project_configuration, name, getattr(config.project, name))
        self.log_with = list(asked.core["log_with"] or ())

    def _lay_out(self, sizes: Any) -> Any:
        """Return torch's mesh, with the names of a ParallelismConfig. Collective."""
        mesh = self.run.mesh and self.run.mesh.device_mesh
        if sizes is not None:
            sizes.device_mesh = sizes.name_joint(mesh) if mesh else sizes.build_device_mesh(self.device.type)
        return mesh if sizes is None else sizes.device_mesh

    def _record_states(self, asked: Asked) -> None:
        """Let the process-wide states say what this Accelerator found."""
        PartialState._reset_state()
        AcceleratorState._reset_state()
        self.state = AcceleratorState(
            self.mixed_precision,
            asked.core["cpu"],
            **{name: asked.kept.get(name) for name in STATE_PLUGINS},
            deepspeed_plugin=asked.deepspeed,
            _from_accelerator=True,
        )
        self.state.device_mesh = self._lay_out(asked.kept.get("parallelism_config"))
        steps = self.run.accumulation_steps
        GradientState()
        self.gradient_state = GradientState.of(self.run)
        plugin = asked.accumulation or GradientAccumulationPlugin(num_steps=steps)
        self.gradient_state.plugin_kwargs = plugin.to_kwargs()
        if asked.core["split_batches"] and self.num_processes > 1:
            warn_once(
                "Accelerator(split_batches=True) splits each batch among the processes; Accelerate ignores "
                "it. Leave it out for Accelerate's numbers; a DataLoaderConfiguration's has effect in both"
            )

    def __reduce__(self) -> Any:
        return runs.pickle_by_reference(self)

    # -- settings --------------------------------------------------------------------------------

    split_batches = _field_of("dataloader_config", "split_batches")
    dispatch_batches = _field_of("dataloader_config", "dispatch_batches")
    even_batches = _field_of("dataloader_config", "even_batches", is_settable=True)
    use_seedable_sampler = _field_of("dataloader_config", "use_seedable_sampler")
    non_blocking = _field_of("dataloader_config", "non_blocking")
    use_stateful_dataloader = _field_of("dataloader_config", "use_stateful_dataloader")
    project_dir = _field_of("project_configuration", "project_dir")
    logging_dir = _field_of("project_configuration", "logging_dir")
    save_iteration = _field_of("project_configuration", "iteration")

    def _apply_settings(self) -> None:
        """Give the run the settings that a program may have assigned, for what is prepared from now on."""
        config, autocast = self.run.config, self.autocast_handler
        if autocast is not None:
            given = {"enabled": autocast.enabled, "cache_enabled": autocast.cache_enabled}
            self.run.reconfigure(autocast=evolve(config.autocast, **given))
        self.run.reconfigure(
            data=evolve(config.data, **vars(self.dataloader_config)),
            rng_types=tuple(str(kind) for kind in self.rng_types or ()),
            device_placement=self.device_placement,
        )
        if self.ddp_handler is not None and "ddp" in self.run.plugins:
            plugin: Any = self.run.plugins["ddp"]
            plugin.config = self.ddp_handler.to_ours()

    @property
    def scheduler_steps(self) -> int:
        """Steps of a scheduler per optimizer step."""
        return steps_each_time(self.run, self.run.config.data.split_batches)

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Schedulers step with their optimizers."""
        return self.run.config.step_scheduler_with_optimizer

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per window.

        A new value counts at once: windows end where `step` is a multiple of it.
        """
        return self.run.accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.run.set_accumulation_steps(steps)
        if self.run.accumulation is None:
            self.step = self.step
        GradientState.of(self.run).plugin_kwargs["num_steps"] = steps

    @property
    def mixed_precision(self) -> str:
        """The precision asked for; fp8 by whichever library."""
        word = super().mixed_precision
        return "fp8" if word.startswith("fp8-") else word

    @property
    def native_amp(self) -> bool:
        """True if autocast lowers the precision."""
        return self.mixed_precision != "no" and self.run.config.autocast.enabled

    @property
    def scaler(self) -> Any:
        """The scaler of the loss under fp16, else None."""
        return self.run.hooks.grad_scaler(None)

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8, or NO."""
        backends = {"fp8-torchao": FP8BackendType.AO, "fp8-te": FP8BackendType.TE}
        return backends.get(self.run.stack.precision.name, FP8BackendType.NO)

    # -- the process's place in the world ----------------------------------------------------------

    tensor_parallel_rank = _rank_along("tp")
    pipeline_parallel_rank = _rank_along("pp")
    context_parallel_rank = _rank_along("cp")
    data_parallel_rank = _rank_along("dp_replicate")
    data_parallel_shard_rank = _rank_along("dp_shard")

    @property
    def distributed_type(self) -> DistributedType:
        """A member of the closed enum."""
        return distributed_type(self.run)

    @property
    def is_divided(self) -> bool:
        """True under a strategy whose ranks hold parts, so that they save together."""
        kinds = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
        return self.distributed_type in (*kinds, DistributedType.XLA)

    @property
    def num_processes(self) -> int:
        """Number of processes by the state, or by the run if both states were reset.

        TrainingArguments resets both.
        """
        return int(self.state.num_processes) if PartialState._shared_state else self.run.world.size

    @property
    def multi_device(self) -> bool:
        """True if several processes have a device each, without a named strategy."""
        return self.use_distributed and self.distributed_type in _MULTI

    @property
    def is_fsdp2(self) -> bool:
        """True if FSDP version 2 shards this run's models."""
        return bool(self.state.is_fsdp2)

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeedPlugin."""
        return self.state.deepspeed_plugin

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """True if the run is laid out on a mesh by a ParallelismConfig."""
        return self.parallelism_config is not None

    @property
    def torch_device_mesh(self) -> Any:
        """torch's mesh of the run, or of a ParallelismConfig that only replicates."""
        sizes = getattr(self.state, "parallelism_config", None)
        return getattr(sizes, "device_mesh", None) if self.run.mesh is None else self.run.mesh.device_mesh

    @property
    def should_save_model(self) -> bool:
        """True if this process has weights to save."""
        return self.is_main_process or self.distributed_type in (
            DistributedType.FSDP,
            DistributedType.DEEPSPEED,
        )

    def on_process(self, function: Callable[..., Any] | None = None, process_index: Any = None) -> Any:
        """Decorate a function to run on the process of that rank only.

        A process that is alone always runs it.
        """
        return super().on_process(function, process_index if self.use_distributed else self.process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: Any = None
    ) -> Any:
        """Decorate a function to run on the process of that local rank only.

        A process that is alone always runs it.
        """
        here = local_process_index if self.use_distributed else self.local_process_index
        return super().on_local_process(function, here)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context that gives this process its share."""
        return PartialState().split_between_processes(inputs, apply_padding)

    # -- prepare ---------------------------------------------------------------------------------

    def prepare(
        self,
        *args: Any,
        device_placement: Sequence[bool | None] | None = None,
        strategy: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Prepare what can be prepared; anything else comes back as it is."""
        self._apply_settings()
        sharding: Any = getattr(self.state, "fsdp_plugin", None)
        for each in args if sharding is not None else ():
            refuse_whole_states(each, sharding.state_dict_type)
        results = preparing.prepare(self, args, device_placement, strategy, name)
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare one model.

        In evaluation mode the model is placed, not wrapped for training.
        """
        few_bits = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        if few_bits and devices & {"cpu", "disk"}:
            raise ValueError(
                "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk"
                " offload.\nload it without a device_map that names cpu or disk"
            )
        if evaluation_mode and getattr(model, "is_distributed_loading_by_transformers", False):
            # transformers' Trainer prepares models that it sharded while it loaded them so, and trains them.
            strategy = None if "fsdp" in self.run.plugins else "fsdp"
            return self.prepare(model, device_placement=[device_placement], strategy=strategy)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """`prepare` for one dataloader."""
        if slice_fn_for_dispatch is not None:
            raise NotServedError(
                "slice_fn_for_dispatch: batches that rank 0 reads for all are sliced along dim 0 here\n"
                "let collate_fn build batches that can be, or set dispatch_batches=False"
            )
        return super().prepare_data_loader(data_loader, device_placement)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """`prepare` for one optimizer."""
        return super().prepare_optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """`prepare` for one scheduler, of any class."""
        known = isinstance(scheduler, AcceleratedScheduler) or kind_of(self.run, scheduler) is not None
        return super().prepare_scheduler(scheduler) if known else preparing.follow_all(self, scheduler)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the dataloader without its first batches, in each epoch."""
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the user's own model without its wrappers."""
        if self.run.prepared.form_of(model) is None:
            return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Tell whether a model is spread over several devices."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The engine of the first model that DeepSpeed trains, as `.engine`; None before."""
        return None if self.state.deepspeed_plugin is None else deepspeed_engine.wrapped(self.run.units)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return the loader: each prepared batch is split over the ranks of `sp` already."""
        return dl

    # Tuples: what is prepared is changed by `prepare` and `free_memory` alone.

    @property
    def _models(self) -> tuple[Any, ...]:
        """The program's own models; under a strategy that divides them, what the strategy made."""
        divided = self.is_divided
        return tuple(model for unit in self.run.units for model in (unit.wrapped if divided else unit.given))

    @property
    def _optimizers(self) -> tuple[Any, ...]:
        return tuple(preparing.optimizers_of(self))

    @property
    def _schedulers(self) -> tuple[Any, ...]:
        return tuple(self._stepping)

    @property
    def _dataloaders(self) -> tuple[Any, ...]:
        return tuple(self.run.prepared.loaders)

    @property
    def _custom_objects(self) -> tuple[Any, ...]:
        ours = [*self._loose, *self._stepping]
        return tuple(thing for thing in self.run.registered if not any(thing is each for each in ours))

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects and give device memory back.

        Returns as many None as there are arguments.
        """
        self._loose.clear()
        self._stepping.clear()
        self._count = 0
        return super().free_memory(*objects)

    clear = free_memory

    # -- the step --------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Micro-batches that `accumulate` has counted since its loader began. Settable."""
        return self._count

    @step.setter
    def step(self, count: int) -> None:
        self._count = count
        window: Any  # an AccelerateWindow
        for window in (self.run.window, *(unit.window for unit in self.run.units)):
            inside = count % self.run.accumulation_steps
            window.move_to(inside - 1)

    def accumulate(self, *models: Any, batch: Any = None) -> Any:
        """Return a context for one micro-batch of a window.

        Models that are not prepared are left out. If none is left, all prepared models take part. Optimizers
        of models that are never named step at the end of this window too.
        """
        self._count = self._next_count()
        try:
            accumulation = self._accumulations[models]
        except (KeyError, TypeError):  # not entered yet; a list of models
            models = stepping.name_models(self, models)
            accumulation = _accumulate(self, *models)
        if batch is not None:
            accumulation = _accumulate(self, *models, batch=batch)
        if not models:
            if not self.run.units:
                self.step = self._count
        elif followers := self._followers.units:
            return Following(accumulation, followers)
        return accumulation

    def _next_count(self) -> int:
        """Return the number of the next micro-batch.

        It is 0 for a loader's last one, which ends its window.
        """
        state, begun = self.gradient_state, self.run.active_loaders
        ended = state.end_of_dataloader if state._begun else bool(begun) and begun[-1].last
        return 0 if ended and state.sync_with_dataloader else self._count + 1

    def _do_sync(self) -> None:
        self.step = self._next_count()

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Give a context in which ranks may have unequally many batches. All ranks.

        Models that are not prepared are left out: they wait for no other rank.
        """
        mine = [model for model in joinables if self.run.prepared.unit_of_model(model) is not None]
        if len(mine) < len(joinables):
            warn_once("join_uneven_inputs: has no effect on a model that is not prepared")
        with super().join_uneven_inputs(mine, even_batches):
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: Any) -> Any:
        """Have the next backward inside reduce gradients of a forward under `no_sync`."""
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        note: Any = getattr(model, "await_backward", None)  # accel-ddp checks that gradients are reduced
        if note is not None:
            note()
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Return the run's autocast, or with other settings."""
        return super().autocast(ours_of(autocast_handler or self.autocast_handler))

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """torch's profiler."""
        return super().profile(ours_of(profile_handler or self.profile_handler))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        """Compute gradients of the loss divided by `gradient_accumulation_steps`.

        The division happens outside of `accumulate` too.
        """
        run = self.run
        if run.accumulation_steps > 1 and (run.accumulation is None or not run.units):
            loss = loss / run.accumulation_steps
        if not kwargs:
            _backward(self, loss)
            return
        if "learning_rate" in kwargs:
            self.lomo_backward(loss, kwargs["learning_rate"])
        kwargs.pop("scale_wrt_gas", None)  # of DeepSpeed's engine, which never scales here
        _backward(self, loss, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Refused: LOMO optimizers are not served."""
        raise NotServedError("lomo_backward: LOMO optimizers are not served\ntake another optimizer")

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip all parameters to a norm; return the norm before.

        Inside a window nothing is clipped, and it is the norm of what there is on this rank.
        """
        return stepping.clip_norm(self, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each gradient at the end of a window."""
        stepping.clip_value(self, parameters, clip_value)

    # Accelerate's has no `gradients`; accel_core.ops.gather does.
    def gather(self, tensor: Any) -> Any:  # type: ignore[override]
        """Concatenate over all ranks, also ranks that share their data. Collective."""
        return (
            accel_core.ops.gather(tensor, every_rank=True, run=self.run) if self.use_distributed else tensor
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and cut to the number of samples that the loader's last round has.

        Collective. Objects are joined item by item; a process that is alone gets its input back.
        """
        return stepping.gather_for_metrics(self, input_data, use_gather_object)

    # Accelerate's has no `gradients`; accel_core.ops.reduce does.
    def reduce(  # type: ignore[override]
        self, tensor: Any, reduction: Any = "sum", scale: float = 1.0
    ) -> Any:
        """Sum or mean over all ranks. Collective."""
        return operations.reduced_over(self.run, tensor, str(reduction), scale)

    # -- trackers --------------------------------------------------------------------------------

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Options | None = None
    ) -> None:
        """Start all trackers."""
        super().init_trackers(project_name, config, self._for_mine("init_trackers", init_kwargs))

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Options | None = None
    ) -> None:
        """Log values to each tracker, if there are any."""
        if self.run.trackers.names:
            super().log(values, step, self._for_mine("log", log_kwargs) if log_kwargs else None)

    def _for_mine(self, where: str, options: Options | None) -> Options:
        known = self.run.trackers.names
        for name in options or ():
            if name not in known:
                warn_once(f"{where}: the entry for {name!r} is ignored, because log_with does not name it")
        return {name: each for name, each in (options or {}).items() if name in known}

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker, or with `unwrap` what it wraps.

        Where none logs on this rank, a blank one.

        Raises:
            ValueError: there is none of that name, but others.
        """
        names, logs_here = self.run.trackers.names, self.is_main_process or bool(super().trackers)
        if name not in names and names and logs_here:
            raise ValueError(f"{name} is not an available tracker stored inside the `Accelerator`.")
        if name not in names or not logs_here:
            return GeneralTracker(_blank=True)
        made = super().get_tracker(name)
        if isinstance(made, Registered):
            return made.tracker.tracker if unwrap else made.tracker
        return super().get_tracker(name, unwrap)

    @property
    def trackers(self) -> list[Any]:
        """Trackers that log on this rank, after `init_trackers`."""
        return [each.tracker if isinstance(each, Registered) else each for each in super().trackers]

    def end_training(self) -> None:
        """Finish the trackers. Programs save after it, so the run ends with the process."""
        self.run.checkpoints.wait(None)
        self.run.trackers.finish()

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object once, or once per node where `save_on_each_node` is set."""
        each_node = self.project_configuration.save_on_each_node
        save_of(self.run, obj, f, each_node, safe_serialization)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore these objects with the state.

        Each needs the methods `state_dict` and `load_state_dict`.
        """
        checkpoints.refuse_stateless(objects)
        super().register_for_checkpointing(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before a state is written.

        What it takes out of `weights` is not written; what it writes into `output_dir` is kept there.
        """
        return checkpoints.register_hook(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before a load.

        Models that the hook removes from the list are not loaded.
        """
        return checkpoints.register_hook(self._load_model_state_pre_hook, hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path | str:
        """Write everything that training needs to go on, and return the path as given.

        Where each rank holds the whole state, the main process writes it, whether others call or not; on a
        load the random streams of the others start anew. Else all ranks must call.

        Raises CheckpointError, on each rank that has them, if gradients are not applied yet.
        """
        return checkpoints.save_state(self, output_dir, safe_serialization, save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Restore what `save_state` wrote. Collective."""
        checkpoints.load_state(self, input_dir, load_kwargs, load_model_func_kwargs)


def _as_before(given: dict[str, Any]) -> None:
    """Fill in the first Accelerator's settings, where others are not given."""
    state = AcceleratorState()
    if given["mixed_precision"] is None:
        given["mixed_precision"] = state.mixed_precision
    given["cpu"] = given["cpu"] or state._cpu
    for name in STATE_PLUGINS:
        if given[name] is None and (name != "dynamo_plugin" or given["dynamo_backend"] is None):
            given[name] = state.__dict__.get(name)
    if given["deepspeed_plugin"] is None and given["deepspeed_plugins"] is None:
        given["deepspeed_plugins"] = state.deepspeed_plugins


def _forget(run: AccelerateRun) -> None:
    """Empty a run whose Accelerator is gone, as the states still look at the run."""
    runs.unregister(run)
    run.prepared.forget()
    run.registered.clear()
