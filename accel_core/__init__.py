"""One ordinary PyTorch training loop on any hardware and under any parallel strategy.

Importing this package imports no torch: each public name is loaded on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core._version import __version__ as __version__
    from accel_core.accelerator import ops
    from accel_core.accelerator.accelerator import Accelerator
    from accel_core.accelerator.local_sgd import LocalSGD
    from accel_core.accelerator.memory import find_executable_batch_size, is_out_of_memory, release_memory
    from accel_core.accelerator.progress import progress
    from accel_core.checkpoint.contents import CheckpointContents
    from accel_core.checkpoint.own_state import refuse_own_state
    from accel_core.contract import hooks
    from accel_core.contract.card import API_VERSION, CAPABILITIES, Card
    from accel_core.contract.config import (
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
    from accel_core.contract.hooks import implements
    from accel_core.contract.job import Job
    from accel_core.contract.mesh import Mesh, MeshDim, arrange
    from accel_core.contract.options import option
    from accel_core.contract.state import (
        Entry,
        Leaf,
        OptimizerState,
        TensorTemplate,
        flat_range,
        leaf_of,
        whole,
    )
    from accel_core.contract.unit import StepOutput, Unit, Window
    from accel_core.contract.world import Collectives, Topology, World
    from accel_core.data.loader import PreparedLoader
    from accel_core.data.skipping import skip_first_batches
    from accel_core.defaults.precision import get_grad_scaler, get_mixed_precision_context_manager
    from accel_core.distributed.logging import MultiProcessAdapter, get_logger
    from accel_core.distributed.random import set_seed, synchronize_rng_state
    from accel_core.errors import (
        AccelError,
        CheckpointError,
        CollectiveError,
        ConfigError,
        LaunchError,
        PluginError,
    )
    from accel_core.launch.notebook import notebook_launcher
    from accel_core.plugins.binding import no_op
    from accel_core.plugins.catalog import catalog_entry, install_hint
    from accel_core.plugins.discovery import Discovery, Record, discover, plugin_status
    from accel_core.runtime.run import Run
    from accel_core.runtime.tracking import GeneralTracker
    from accel_core.training.prior_state import has_state
    from accel_core.training.proxies import PreparedOptimizer, PreparedScheduler

_HOMES = {
    "_version": "__version__",
    "accelerator.accelerator": "Accelerator",
    "accelerator.local_sgd": "LocalSGD",
    "accelerator.memory": "find_executable_batch_size is_out_of_memory release_memory",
    "accelerator.progress": "progress",
    "checkpoint.contents": "CheckpointContents",
    "checkpoint.own_state": "refuse_own_state",
    "contract.card": "API_VERSION CAPABILITIES Card",
    "contract.config": (
        "AutocastKwargs DataLoaderConfiguration GradScalerKwargs GradientAccumulationPlugin "
        "InitProcessGroupKwargs KwargsHandler ProfileKwargs ProjectConfiguration Proposal RunConfig "
        "TorchDynamoPlugin"
    ),
    "contract.hooks": "implements",
    "contract.job": "Job",
    "contract.mesh": "Mesh MeshDim arrange",
    "contract.options": "option",
    "contract.state": "Entry Leaf OptimizerState TensorTemplate flat_range leaf_of whole",
    "contract.unit": "StepOutput Unit Window",
    "contract.world": "Collectives Topology World",
    "data.loader": "PreparedLoader",
    "data.skipping": "skip_first_batches",
    "defaults.precision": "get_grad_scaler get_mixed_precision_context_manager",
    "distributed.logging": "MultiProcessAdapter get_logger",
    "distributed.random": "set_seed synchronize_rng_state",
    "errors": "AccelError CheckpointError CollectiveError ConfigError LaunchError PluginError",
    "launch.notebook": "notebook_launcher",
    "plugins.binding": "no_op",
    "plugins.discovery": "Discovery Record discover plugin_status",
    "plugins.catalog": "install_hint catalog_entry",
    "runtime.run": "Run",
    "runtime.tracking": "GeneralTracker",
    "training.prior_state": "has_state",
    "training.proxies": "PreparedOptimizer PreparedScheduler",
}
_MODULES = {"hooks": "contract.hooks", "ops": "accelerator.ops"}
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
    "Discovery",
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
    "Record",
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
    "catalog_entry",
    "discover",
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
    if name in _MODULES:
        value: Any = import_module(f"accel_core.{_MODULES[name]}")
    elif name in _HOME:
        value = getattr(import_module(f"accel_core.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'accel_core' has no attribute {name!r}", name=name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
