"""One ordinary PyTorch training loop on any hardware and under any parallel strategy.

Importing this package imports no torch: each public name is loaded on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core import hookspecs as hooks
    from accel_core import ops
    from accel_core.accelerator import Accelerator
    from accel_core.binding import no_op
    from accel_core.carrying import has_state
    from accel_core.checkpoint.contents import CheckpointContents
    from accel_core.checkpoint.leaf import (
        Entry,
        Leaf,
        OptimizerState,
        TensorTemplate,
        flat_range,
        leaf_of,
        whole,
    )
    from accel_core.config.options import option
    from accel_core.config.schema import (
        AutocastKwargs,
        DataLoaderConfiguration,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        KwargsHandler,
        ProfileKwargs,
        ProjectConfiguration,
        Proposal,
        RunConfig,
        TorchDynamoPlugin,
    )
    from accel_core.data.loader import PreparedLoader
    from accel_core.data.skipping import skip_first_batches
    from accel_core.errors import (
        AccelError,
        CheckpointError,
        CollectiveError,
        ConfigError,
        LaunchError,
        PluginError,
    )
    from accel_core.hookspecs import API_VERSION, Job, StepOutput, implements
    from accel_core.known import install_hint
    from accel_core.local_sgd import LocalSGD
    from accel_core.logging import MultiProcessAdapter, get_logger
    from accel_core.memory import find_executable_batch_size, is_out_of_memory, release_memory
    from accel_core.mesh import Mesh, MeshDim, arrange
    from accel_core.native.own import refuse_own_state
    from accel_core.native.precision import get_grad_scaler, get_mixed_precision_context_manager
    from accel_core.notebook import notebook_launcher
    from accel_core.plugins import CAPABILITIES, Card, plugin_status
    from accel_core.progress_bar import progress
    from accel_core.proxies import PreparedOptimizer, PreparedScheduler
    from accel_core.random import set_seed, synchronize_rng_state
    from accel_core.run import Run
    from accel_core.tracking import GeneralTracker
    from accel_core.unit import Unit, Window
    from accel_core.world import Collectives, Topology, World

__version__ = "0.1.0"

_HOMES = {
    "accelerator": "Accelerator",
    "binding": "no_op",
    "carrying": "has_state",
    "checkpoint.contents": "CheckpointContents",
    "checkpoint.leaf": "Entry Leaf OptimizerState TensorTemplate flat_range leaf_of whole",
    "config.options": "option",
    "config.schema": (
        "AutocastKwargs DataLoaderConfiguration GradScalerKwargs GradientAccumulationPlugin "
        "InitProcessGroupKwargs KwargsHandler ProfileKwargs ProjectConfiguration Proposal RunConfig "
        "TorchDynamoPlugin"
    ),
    "data.loader": "PreparedLoader",
    "data.skipping": "skip_first_batches",
    "errors": "AccelError CheckpointError CollectiveError ConfigError LaunchError PluginError",
    "hookspecs": "API_VERSION Job StepOutput implements",
    "known": "install_hint",
    "local_sgd": "LocalSGD",
    "logging": "MultiProcessAdapter get_logger",
    "memory": "find_executable_batch_size is_out_of_memory release_memory",
    "mesh": "Mesh MeshDim arrange",
    "native.own": "refuse_own_state",
    "native.precision": "get_grad_scaler get_mixed_precision_context_manager",
    "notebook": "notebook_launcher",
    "plugins": "CAPABILITIES Card plugin_status",
    "progress_bar": "progress",
    "proxies": "PreparedOptimizer PreparedScheduler",
    "random": "set_seed synchronize_rng_state",
    "run": "Run",
    "tracking": "GeneralTracker",
    "unit": "Unit Window",
    "world": "Collectives Topology World",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "API_VERSION",
    "CAPABILITIES",
    "AccelError",
    "Accelerator",
    "AutocastKwargs",
    "Card",
    "CheckpointContents",
    "CheckpointError",
    "CollectiveError",
    "Collectives",
    "ConfigError",
    "DataLoaderConfiguration",
    "Entry",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "Job",
    "KwargsHandler",
    "LaunchError",
    "Leaf",
    "LocalSGD",
    "Mesh",
    "MeshDim",
    "MultiProcessAdapter",
    "OptimizerState",
    "PluginError",
    "PreparedLoader",
    "PreparedOptimizer",
    "PreparedScheduler",
    "ProfileKwargs",
    "ProjectConfiguration",
    "Proposal",
    "Run",
    "RunConfig",
    "StepOutput",
    "TensorTemplate",
    "Topology",
    "TorchDynamoPlugin",
    "Unit",
    "Window",
    "World",
    "arrange",
    "find_executable_batch_size",
    "flat_range",
    "get_grad_scaler",
    "get_logger",
    "get_mixed_precision_context_manager",
    "has_state",
    "hooks",
    "implements",
    "install_hint",
    "is_out_of_memory",
    "leaf_of",
    "no_op",
    "notebook_launcher",
    "ops",
    "option",
    "plugin_status",
    "progress",
    "refuse_own_state",
    "release_memory",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_state",
    "whole",
]


def __getattr__(name: str) -> Any:
    if name in ("hooks", "ops"):
        value: Any = import_module(f"accel_core.{'hookspecs' if name == 'hooks' else name}")
    elif name in _HOME:
        value = getattr(import_module(f"accel_core.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'accel_core' has no attribute {name!r}", name=name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
