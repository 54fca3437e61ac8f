"""The process's place in the world, in Accelerate's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_compat.accelerator.tracking import Tracking
from accel_compat.configs.enums import DistributedType
from accel_compat.state.states import PartialState, distributed_type

_MULTI = frozenset(kind for kind in DistributedType if kind.value.startswith("MULTI_")) - {"MULTI_CPU"}


def _rank_along(dim: str) -> Any:
    def get(self: Ranks) -> int:
        return 0 if self.run.mesh is None else self.run.mesh.index(dim)

    return property(get, doc=f"This process's rank along the mesh's dimension {dim}.")


class Ranks(Tracking):
    """An Accelerator's place in the world, and what runs on some processes only."""

    state: Any

    @property
    def distributed_type(self) -> DistributedType:
        """A member of the closed enum."""
        return distributed_type(self.run)

    @property
    def num_processes(self) -> int:
        """Number of processes by the state, or by the run if both states were reset.

        TrainingArguments resets both.
        """
        return int(self.state.num_processes) if PartialState._shared_state else self.run.world.size

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

    @property
    def multi_device(self) -> bool:
        """True if several processes have a device each, without a named strategy."""
        return self.use_distributed and self.distributed_type in _MULTI

    @property
    def torch_device_mesh(self) -> Any:
        """torch's mesh of the run, or of a ParallelismConfig that only replicates."""
        sizes = getattr(self.state, "parallelism_config", None)
        return getattr(sizes, "device_mesh", None) if self.run.mesh is None else self.run.mesh.device_mesh

    tensor_parallel_rank = _rank_along("tp")
    pipeline_parallel_rank = _rank_along("pp")
    context_parallel_rank = _rank_along("cp")
    data_parallel_rank = _rank_along("dp_replicate")
    data_parallel_shard_rank = _rank_along("dp_shard")
