"""The config classes that name no strategy: mutable here, frozen in accel-core."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from typing import Any

import torch

from accel_compat.configs.enums import DDPCommunicationHookType, DynamoBackend
from accel_compat.configs.translation import Translated, fields_of
from accel_compat.environment.variables import clear_environment
from accel_compat.notices import warn_once
from accel_compat.settings import fill_from_variables


class KwargsHandler(Translated):
    """Base of what `kwargs_handlers` takes."""

    def to_dict(self) -> dict[str, Any]:
        """Return a deep copy of the fields."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from the class's defaults."""
        with clear_environment():
            default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


@fields_of("accel_core:AutocastKwargs", without=["outputs_to_fp32"])
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast`."""


@fields_of(
    "accel_ddp:DistributedDataParallelKwargs",
    comm_hook=DDPCommunicationHookType.NO,
    comm_wrapper=DDPCommunicationHookType.NO,
)
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of DistributedDataParallel, and how its gradients are compressed."""

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the fields that torch's DistributedDataParallel takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Nothing to do: a prepared model has its hook."""


@fields_of("accel_core:GradScalerKwargs")
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scale of fp16."""


@fields_of("accel_core:InitProcessGroupKwargs", backend="nccl")
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the process group."""

    timeout: Any

    def __post_init__(self) -> None:
        if isinstance(self.timeout, (int, float)):
            self.timeout = timedelta(seconds=self.timeout)
        if self.timeout is None:
            self.timeout = timedelta(seconds=600 if self.backend == "nccl" else 1800)


@fields_of("accel_core:ProfileKwargs")
class ProfileKwargs(KwargsHandler):
    """Options of `accelerator.profile()`."""

    def recordable(self) -> list[str] | None:
        """Return the activities that torch can record here; warn of the others."""
        here = {each.name for each in torch.profiler.supported_activities()}
        left = [name for name in self.activities or () if name.upper() not in here]
        if left:
            warn_once(f"profile: {', '.join(left)} cannot be recorded on this machine, and is left out")
        return None if self.activities is None else [name for name in self.activities if name not in left]

    def translation(self) -> dict[str, Any]:
        """Without the activities that there are not."""
        given = super().translation()
        return {**given, "activities": self.recordable()} if "activities" in given else given

    def build(self) -> torch.profiler.profile:
        """Return a profiler of torch with these settings."""
        known = torch.profiler.ProfilerActivity.__members__
        unknown = [name for name in self.activities or () if name.upper() not in known]
        if unknown:
            words = [name.lower() for name in known]
            raise ValueError(f"Invalid profiler activity: {unknown[0]}. Must be one of {words}.")
        kinds = [known[name.upper()] for name in self.recordable() or ()]
        asked = self.schedule_option
        passed = (
            "record_shapes",
            "profile_memory",
            "with_stack",
            "with_flops",
            "with_modules",
            "on_trace_ready",
        )
        return torch.profiler.profile(
            activities=kinds or None,
            schedule=None if asked is None else torch.profiler.schedule(**asked),
            **{name: getattr(self, name) for name in passed},
        )


@fields_of("accel_core:DataLoaderConfiguration")
class DataLoaderConfiguration(Translated):
    """Options of prepared dataloaders."""


@fields_of("accel_core:ProjectConfiguration", logging_dir=None)
class ProjectConfiguration(Translated):
    """Folders of a run."""

    logging_dir: Any

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Take another project folder; logs go there too, if they had none of their own."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@fields_of("accel_core:GradientAccumulationPlugin")
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation."""


@fields_of("accel_core:TorchDynamoPlugin")
class TorchDynamoPlugin(KwargsHandler):
    """Options of torch.compile. ACCELERATE_DYNAMO_ variables fill what is not given."""

    backend: Any

    def __post_init__(self) -> None:
        asked = self.backend or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
        self.backend = DynamoBackend(str(getattr(asked, "value", asked)).upper())
        fill_from_variables(self, "compile", "mode", "fullgraph", "dynamic", "use_regional_compilation")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, the backend as torch spells it."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of `torch.compile`."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        return kwargs

    def translation(self) -> dict[str, Any]:
        given = super().translation()
        if self.backend is DynamoBackend.NO:
            return {}
        return {**given, "backend": self.backend.value.lower()}
