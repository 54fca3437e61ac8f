"""Which process this is, among which, by the words that Accelerate has for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from ._tracking import Tracking
from .state import PartialState, distributed_type
from .utils._enums import DistributedType

_MULTI = frozenset(kind for kind in DistributedType if kind.value.startswith("MULTI_"))


class Ranks(Tracking):
    """An Accelerator's place in the world, and what runs on some processes only."""

    state: Any

    @property
    def distributed_type(self) -> DistributedType:
        """A member of the closed enum."""
        return distributed_type(self.run)

    @property
    def num_processes(self) -> int:
        """As the state has it; the run's where both states were reset, as TrainingArguments resets them."""
        return int(self.state.num_processes) if PartialState._shared_state else self.run.world.size

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: run on the process of that rank only; in a process that is alone always."""
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return self._only(function, lambda: self.process_index == process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: run on the process of that local rank only; in a process that is alone always."""
        if function is None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(function, lambda: self.local_process_index == local_process_index)

    def _only(self, function: Callable[..., Any], here: Callable[[], bool]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if here() or not self.use_distributed else None

        return run

    @property
    def multi_device(self) -> bool:
        """Whether several processes have a device each, under no strategy with a name of its own."""
        return self.use_distributed and self.distributed_type in _MULTI

    @property
    def torch_device_mesh(self) -> Any:
        """torch's mesh of the run, if it has one."""
        return None if self.run.mesh is None else self.run.mesh.device_mesh

    def _rank_along(self, dim: str) -> int:
        return 0 if self.run.mesh is None else self.run.mesh.index(dim)

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's rank among those that share tensors."""
        return self._rank_along("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This process's stage."""
        return self._rank_along("pp")

    @property
    def context_parallel_rank(self) -> int:
        """This process's rank among those that share sequences."""
        return self._rank_along("cp")

    @property
    def data_parallel_rank(self) -> int:
        """This process's rank among the replicas."""
        return self._rank_along("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's rank among those that shard one replica."""
        return self._rank_along("dp_shard")
