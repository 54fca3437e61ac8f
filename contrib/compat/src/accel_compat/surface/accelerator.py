"""Accelerator with the arguments, attributes and habits of Accelerate 1.15, over accel-core's."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from attrs import evolve
from torch.utils.hooks import RemovableHandle

from accel_compat import runs
from accel_compat.refusing import NotServedError, unserved
from accel_compat.saying import say_once
from accel_core import Run

from ._arguments import STATE_PLUGINS, Asked, read
from ._ranks import Ranks
from .state import AcceleratorState, GradientState, PartialState, distributed_type
from .utils._enums import DistributedType
from .utils._handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
)
from .utils.constants import (
    MODEL_NAME,
    PROFILE_PATTERN_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    SCALER_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from .utils.operations import all_tensors, recursively_apply


class Accelerator(Ranks):
    """As Accelerate documents it. `run`, and what else accel-core's Accelerator has, is there too."""

    autocast_handler: AutocastKwargs | None
    profile_handler: ProfileKwargs | None
    parallelism_config: Any

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
        asked = read(given)
        if AcceleratorState._shared_state and mixed_precision is not None:
            AcceleratorState()._check_initialized(asked.core["mixed_precision"], cpu)
        self._loose, self._stepping = [], []
        super().__init__(**asked.spoken())
        runs.adopt(self.run)
        for name, value in asked.kept.items():
            setattr(self, name, value)
        self._record_states(asked)
        weakref.finalize(self, _forget, self.run).atexit = False
        self.step = 0
        self.flag_tensor = None
        self._save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()

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
        steps = self.run.accumulation_steps
        self.gradient_state = GradientState(asked.accumulation or GradientAccumulationPlugin(num_steps=steps))

    # -- who and where ---------------------------------------------------------------------------

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP version 2 shards this run's models."""
        return bool(self.state.is_fsdp2)

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeedPlugin."""
        return self.state.deepspeed_plugin

    @property
    def fp8_backend(self) -> None:
        """None: there is no fp8 yet."""
        return None

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether the run is laid out on a mesh by a ParallelismConfig."""
        return self.parallelism_config is not None

    @property
    def should_save_model(self) -> bool:
        """Whether this process has weights to save."""
        return self.is_main_process or self.distributed_type in (
            DistributedType.FSDP,
            DistributedType.DEEPSPEED,
        )

    # -- data ------------------------------------------------------------------------------------

    @property
    def split_batches(self) -> bool:
        """As configured."""
        return self.run.config.data.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """As configured."""
        return self.run.config.data.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """As configured. Settable: for loaders prepared from now on."""
        return self.run.config.data.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        config = self.run.config
        self.run.config = evolve(config, data=evolve(config.data, even_batches=value))

    @property
    def use_seedable_sampler(self) -> bool:
        """As configured."""
        return self.run.config.data.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """As configured."""
        return self.run.config.data.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """As configured."""
        return self.run.config.data.use_stateful_dataloader

    @property
    def scaler(self) -> Any:
        """The scaler of the loss, once a model is prepared under fp16."""
        return next((unit.scaler for unit in self.run.units if unit.scaler is not None), None)

    @property
    def native_amp(self) -> bool:
        """Whether torch.autocast computes in a lower precision."""
        return self.mixed_precision != "no"

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Whether a model is spread over several devices."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    # -- the step --------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        """Gradients of the loss, divided by gradient_accumulation_steps, outside `accumulate` too."""
        run = self.run
        if kwargs:
            if "learning_rate" in kwargs:
                self.lomo_backward(loss, kwargs["learning_rate"])
            kwargs.pop("scale_wrt_gas", None)  # of DeepSpeed's engine, which never scales here
        if run.accumulation is None and run.accumulation_steps > 1:
            loss = loss / run.accumulation_steps
        super().backward(loss, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Refused: LOMO optimizers are not served."""
        raise NotServedError("lomo_backward: LOMO optimizers are not served\ntake another optimizer")

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Refused: sequences are split by accel-context-parallel here."""
        raise NotServedError(
            "deepspeed_ulysses_dl_adapter: DeepSpeed's Ulysses is not served\ntake accel-context-parallel"
        )

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: Any) -> Any:
        """Inside, the next backward reduces gradients although the forward ran under `no_sync`."""
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    def __reduce__(self) -> Any:
        return runs.reduced(self)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """The run's autocast, or with other settings."""
        return super().autocast(_ours(autocast_handler or self.autocast_handler))

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """torch's profiler."""
        return super().profile(_ours(profile_handler or self.profile_handler))

    # -- collectives: in a world of one, what was given -------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate over all ranks. Collective."""
        return super().gather(tensor) if self.use_distributed else tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, cut to as many samples as the loader's last round has. Collective."""
        found = super().gather_for_metrics(input_data, use_gather_object)
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return found
        length = state.remainder
        if use_gather_object or not all_tensors(found):
            return found[:length] if isinstance(found, list) else found
        return recursively_apply(lambda tensor: tensor[:length], found)

    def reduce(self, tensor: Any, reduction: Any = "sum", scale: float = 1.0) -> Any:
        """Sum or mean over all ranks. Collective."""
        return super().reduce(tensor, str(reduction), scale)  # type: ignore[arg-type]

    # -- state -----------------------------------------------------------------------------------

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` on all ranks when a state was saved."""
        return _registered(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` on all ranks before a state is loaded."""
        return _registered(self._load_hooks, hook)

    def save_state(  # type: ignore[override]
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write everything that training needs to go on. Collective."""
        options = {
            name: save_model_func_kwargs.pop(name)
            for name in ("step", "wait")
            if name in save_model_func_kwargs
        }
        if not safe_serialization or save_model_func_kwargs:
            say_once(
                "save_state: weights are always written by safetensors; other arguments mean nothing here"
            )
        written = str(super().save_state(output_dir, **options))
        if self._save_hooks:
            weights = [self.get_state_dict(model) for model in self._models]
            for hook in self._save_hooks.values():
                hook(self._models, weights, written)
        return written

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Restore it. Collective."""
        if input_dir is not None:
            for hook in self._load_hooks.values():
                hook(self._models, str(input_dir))
        options = {
            name: load_model_func_kwargs[name] for name in ("strict",) if name in load_model_func_kwargs
        }
        if load_kwargs or load_model_func_kwargs.keys() - options.keys():
            say_once("load_state: arguments for torch.load mean nothing here; no pickle is read")
        loaded = super().load_state(input_dir, **options)
        if input_dir is None:  # only now it is known which one that is
            for hook in self._load_hooks.values():
                hook(self._models, str(loaded))


def _forget(run: Run) -> None:
    """With its Accelerator a run, which the states go on looking at, loses what only that could reach."""
    for held in (run.units, run.trained, run.optimizers, run.loaders, run.registered):
        held.clear()
    run.homes.forget()


def _ours(handler: Any) -> Any:
    return handler.to_ours() if hasattr(handler, "to_ours") else handler


def _registered(table: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(table)
    table[handle.id] = hook
    return handle


__getattr__ = unserved(__name__)
