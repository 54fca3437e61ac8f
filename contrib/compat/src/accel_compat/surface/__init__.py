"""`accelerate`, as programs import it; what runs is accel-core."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accel_compat.finding import VERSION as __version__

from . import big_modeling, hooks, inference, local_sgd, logging, state, utils
from .accelerator import Accelerator
from .big_modeling import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)
from .data_loader import skip_first_batches
from .inference import prepare_pippy
from .launchers import debug_launcher, notebook_launcher
from .parallelism_config import ParallelismConfig
from .state import PartialState
from .utils.dataclasses import (
    AutocastKwargs,
    BnbQuantizationConfig,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
)
from .utils.imports import is_rich_available
from .utils.memory import find_executable_batch_size
from .utils.modeling import infer_auto_device_map, load_checkpoint_in_model
from .utils.random import synchronize_rng_states


def __getattr__(name: str) -> Any:
    """The modules that `import accelerate` loads there; here when they are asked for."""
    if name in (
        "checkpointing",
        "commands",
        "data_loader",
        "launchers",
        "tracking",
        "optimizer",
        "scheduler",
    ):
        return import_module(f"accelerate.{name}")
    raise AttributeError(f"module 'accelerate' has no attribute {name!r}", name=name)
