"""The config classes that name no strategy: mutable here, frozen in accel-core."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch

from accel_compat.saying import say_once
from accel_compat.translating import Translated

from ._enums import DDPCommunicationHookType, DynamoBackend
from .environment import clear_environment, parse_flag_from_env


class KwargsHandler(Translated):
    """Base of what `kwargs_handlers` takes."""

    def to_dict(self) -> dict[str, Any]:
        """A deep copy of the fields."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from the class's defaults."""
        with clear_environment():
            default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    """How `torch.autocast` behaves."""

    ours: ClassVar[str] = "accel_core:AutocastKwargs"

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of DistributedDataParallel, and how its gradients are compressed."""

    ours: ClassVar[str] = "accel_ddp:DistributedDataParallelKwargs"

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The fields that torch's DistributedDataParallel takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Nothing to do: a prepared model has its hook."""


@dataclass
class GradScalerKwargs(KwargsHandler):
    """How the loss scale of fp16 changes."""

    ours: ClassVar[str] = "accel_core:GradScalerKwargs"

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group is made."""

    ours: ClassVar[str] = "accel_core:InitProcessGroupKwargs"

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if isinstance(self.timeout, (int, float)):
            self.timeout = timedelta(seconds=self.timeout)
        if self.timeout is None:
            self.timeout = timedelta(seconds=600 if self.backend == "nccl" else 1800)


@dataclass
class ProfileKwargs(KwargsHandler):
    """How `accelerator.profile()` records."""

    ours: ClassVar[str] = "accel_core:ProfileKwargs"

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def recordable(self) -> list[str] | None:
        """Those of the activities that torch can record on this machine; which it cannot is said once."""
        here = {each.name for each in torch.profiler.supported_activities()}
        left = [name for name in self.activities or () if name.upper() not in here]
        if left:
            say_once(f"profile: {', '.join(left)} cannot be recorded on this machine, and is left out")
        return None if self.activities is None else [name for name in self.activities if name not in left]

    def translation(self) -> dict[str, Any]:
        """Without the activities that there are not."""
        given = super().translation()
        return {**given, "activities": self.recordable()} if "activities" in given else given

    def build(self) -> torch.profiler.profile:
        """A profiler of torch with these settings."""
        known = torch.profiler.ProfilerActivity.__members__
        unknown = [name for name in self.activities or () if name.upper() not in known]
        if unknown:
            words = [name.lower() for name in known]
            raise ValueError(f"Invalid profiler activity: {unknown[0]}. Must be one of {words}.")
        kinds = [known[name.upper()] for name in self.recordable() or ()]
        return torch.profiler.profile(
            activities=kinds or None,
            schedule=None
            if self.schedule_option is None
            else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class DataLoaderConfiguration(Translated):
    """How prepared dataloaders share out the data."""

    ours: ClassVar[str] = "accel_core:DataLoaderConfiguration"

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration(Translated):
    """Where a run writes."""

    ours: ClassVar[str] = "accel_core:ProjectConfiguration"

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Take another project folder; logs go there too, if they had none of their own."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated."""

    ours: ClassVar[str] = "accel_core:GradientAccumulationPlugin"

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How models are compiled; what is not given comes from ACCELERATE_DYNAMO_ variables."""

    ours: ClassVar[str] = "accel_core:TorchDynamoPlugin"

    backend: DynamoBackend = None  # type: ignore[assignment]  # filled by __post_init__
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        prefix = "ACCELERATE_DYNAMO_"
        asked: str | None = self.backend or os.environ.get(f"{prefix}BACKEND", "no")
        self.backend = DynamoBackend(str(getattr(asked, "value", asked)).upper())
        if self.mode is None:
            self.mode = os.environ.get(f"{prefix}MODE", "default")
        if self.fullgraph is None:
            self.fullgraph = parse_flag_from_env(f"{prefix}USE_FULLGRAPH")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = parse_flag_from_env(f"{prefix}USE_REGIONAL_COMPILATION")
        if self.dynamic is None and f"{prefix}USE_DYNAMIC" in os.environ:
            self.dynamic = parse_flag_from_env(f"{prefix}USE_DYNAMIC")

    def to_dict(self) -> dict[str, Any]:
        """The fields, the backend as torch spells it."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """What `torch.compile` is to be given."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        return kwargs

    def translation(self) -> dict[str, Any]:
        given = super().translation()
        if self.backend is DynamoBackend.NO:
            return {}
        return {**given, "backend": self.backend.value.lower()}


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor that is elsewhere."""

    shape: torch.Size
    dtype: torch.dtype
