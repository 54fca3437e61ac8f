"""One ordinary PyTorch training loop for any hardware and any parallel strategy.

Importing this package imports no torch: each public name is loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import Any, Final

_PUBLIC: Final = {
    "_version": "__version__",
    "accelerator": "ops",
    "accelerator.accelerator": "Accelerator",
    "accelerator.local_sgd": "LocalSGD",
    "accelerator.memory": "find_executable_batch_size is_out_of_memory release_memory",
    "checkpoint.places": "storage_at",
    "checkpoint.stored_weights": "stored_weights weights_of_unit",
    "checkpoint.defaults": "refuse_own_state",
    "checkpoint.weight_files": "weights_in write_weights",
    "config.parallelism": "ParallelismConfig",
    "contract": "hooks",
    "contract.bound": "merge no_op",
    "contract.card": "API_VERSION CAPABILITIES Card check_name",
    "contract.config": (
        "AutocastKwargs DataLoaderConfiguration GradScalerKwargs GradientAccumulationPlugin "
        "InitProcessGroupKwargs KwargsHandler LaunchConfig ProfileKwargs ProjectConfiguration Proposal "
        "RunConfig TorchDynamoPlugin"
    ),
    "contract.data": "DataSource",
    "contract.hooks": "implements",
    "contract.job": "Allocation Job SubmittedJob",
    "contract.mesh": "Mesh MeshDim arrange",
    "contract.options": "masked option",
    "contract.spec": "spec",
    "contract.state": "Entry Leaf OptimizerState TensorTemplate flat_range full_leaf leaf_of",
    "contract.step_hook": "before_step",
    "contract.unit": "StepOutput Unit",
    "contract.window": "Window",
    "contract.world": "Collectives RandomStream Task Topology World",
    "data.loader": "PreparedLoader",
    "data.skipping": "skip_first_batches",
    "defaults.lines": "LineFile",
    "defaults.precision": "LossScaler get_grad_scaler get_mixed_precision_context_manager",
    "distributed.logging": "MultiProcessAdapter get_logger",
    "distributed.mailbox": "mailbox_of",
    "distributed.progress": "progress show_progress",
    "distributed.stderr": "tell",
    "distributed.random": "set_seed synchronize_rng_state",
    "errors": "AccelError CheckpointError CollectiveError ConfigError LaunchError PluginError uncaught_error",
    "launch.notebook": "notebook_launcher",
    "plugins.discovery": "Discovery Record discover plugin_status",
    "plugins.catalog": "install_hint catalog_entry",
    "runtime.explain": "explain",
    "runtime.run": "Run",
    "runtime.tracking": "GeneralTracker",
    "storage.commit": "Manifest commits manifests read_manifest",
    "storage.disk": "Disk",
    "storage.files": "DamagedError DataFile FileRecord Meter UnreadableError",
    "storage.leaves": "Box",
    "storage.opened": "Opened open_checkpoint",
    "storage.pending": "Pending",
    "storage.plan": "tiling_problem",
    "storage.protocols": "Storage",
    "storage.ranks": "StoreMailbox",
    "storage.tensors": "Checkpoint Stored",
    "storage.write": "Outline write_checkpoint",
    "training.granularity": "optimizer_like requires_closure step_granularity",
    "training.joint_state": "JointState unplaceable_state",
    "training.own_group": "join_process_group leave_process_group",
    "training.plan": "kind_of",
    "training.prior_state": "has_state",
    "training.proxies": "PreparedOptimizer PreparedScheduler",
    "training.step_hooks": "step_with_hooks",
    "training.unwrap": "unwrap_model",
}
"""Module -> its public names. `tools/reference.py` writes `__init__.pyi` from them, for type checkers."""
_MODULES: Final = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = [name for name in _MODULES if name != "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'accel_core' has no attribute {name!r}", name=name)
    # Unlike import_module, this also imports `ops` and `hooks`, which are modules themselves.
    module = __import__(f"accel_core.{_MODULES[name]}", fromlist=[name])
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
