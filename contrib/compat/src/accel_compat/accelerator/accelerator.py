"""Accelerator with the arguments, attributes and behaviour of Accelerate 1.15."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from accel_compat import runs
from accel_compat.accelerator.arguments import STATE_PLUGINS, Asked, read
from accel_compat.accelerator.following import Followers
from accel_compat.accelerator.stepping import Stepping
from accel_compat.configs.enums import DistributedType, FP8BackendType
from accel_compat.configs.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
)
from accel_compat.configs.translation import ours_of
from accel_compat.notices import warn_once
from accel_compat.state import operations
from accel_compat.state.gradient_state import GradientState
from accel_compat.state.states import AcceleratorState, PartialState
from accel_compat.unsupported import NotServedError
from accel_core import Run


class Accelerator(Stepping):
    """Accelerate's Accelerator, with `run` and all that accel-core's has besides."""

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
        self._save_model_state_pre_hook = OrderedDict()
        self._load_model_state_pre_hook = OrderedDict()
        self._note_numbers()

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

    # -- the run ---------------------------------------------------------------------------------

    @property
    def is_fsdp2(self) -> bool:
        """True if FSDP version 2 shards this run's models."""
        return bool(self.state.is_fsdp2)

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeedPlugin."""
        return self.state.deepspeed_plugin

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8, or NO."""
        backends = {"fp8-torchao": FP8BackendType.AO, "fp8-te": FP8BackendType.TE}
        return backends.get(self.run.stack.precision.name, FP8BackendType.NO)

    @property
    def mixed_precision(self) -> str:
        """The precision asked for; fp8 by whichever library."""
        word = super().mixed_precision
        return "fp8" if word.startswith("fp8-") else word

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """True if the run is laid out on a mesh by a ParallelismConfig."""
        return self.parallelism_config is not None

    @property
    def should_save_model(self) -> bool:
        """True if this process has weights to save."""
        return self.is_main_process or self.distributed_type in (
            DistributedType.FSDP,
            DistributedType.DEEPSPEED,
        )

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Tell whether a model is spread over several devices."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    # -- the step --------------------------------------------------------------------------------

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Refused: sequences are split by accel-context-parallel here."""
        raise NotServedError(
            "deepspeed_ulysses_dl_adapter: DeepSpeed's Ulysses is not served\ntake accel-context-parallel"
        )

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

    def __reduce__(self) -> Any:
        return runs.pickle_by_reference(self)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Return the run's autocast, or with other settings."""
        return super().autocast(ours_of(autocast_handler or self.autocast_handler))

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """torch's profiler."""
        return super().profile(ours_of(profile_handler or self.profile_handler))

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context that gives this process its share."""
        return PartialState().split_between_processes(inputs, apply_padding)

    # Accelerate's has no `gradients`; accel_core.ops.reduce does.
    def reduce(  # type: ignore[override]
        self, tensor: Any, reduction: Any = "sum", scale: float = 1.0
    ) -> Any:
        """Sum or mean over all ranks. Collective."""
        return operations.reduced_over(self.run, tensor, str(reduction), scale)


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


def _forget(run: Run) -> None:
    """Empty a run whose Accelerator is gone, as the states still look at the run."""
    runs.unregister(run)
    run.prepared.forget()
    run.registered.clear()
