"""The Accelerator's methods for processes: ranks and collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from accel_core.accelerator import ops
from accel_core.distributed.collectives import Reduction
from accel_core.distributed.exchange import collective_call

if TYPE_CHECKING:
    from accel_core.runtime.run import Run

P = ParamSpec("P")
R = TypeVar("R")


class Ranks:
    """Base of Accelerator, which holds the `run`."""

    run: Run

    # -- ranks ----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.run.device

    @property
    def num_processes(self) -> int:
        """World size."""
        return self.run.world.size

    @property
    def process_index(self) -> int:
        """Rank in the world."""
        return self.run.world.rank

    @property
    def local_process_index(self) -> int:
        """Rank on this node."""
        return self.run.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.run.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on local rank 0 of each node."""
        return self.run.world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """True on the last rank of the world."""
        return self.run.world.rank == self.run.world.size - 1

    @property
    def use_distributed(self) -> bool:
        """True if there are several processes."""
        return self.run.world.size > 1

    @property
    def distributed_type(self) -> str:
        """Accelerate's word for the strategy; for the device, if the strategy has none or MULTI_DEVICE."""
        stack = self.run.stack
        word, device = stack.strategy.card.distributed_type, stack.device.card.distributed_type
        return (device or word or stack.strategy.name) if word in (None, "MULTI_DEVICE") else word

    # -- collectives: documented once, in accelerator/ops.py ----------------------------------------

    def gather(self, tensor: Any, *, gradients: bool = False) -> Any:
        """Concatenate each tensor (n, ...) of every reader: (readers * n, ...).

        Collective. See `ops.gather`.
        """
        return ops.gather(tensor, gradients=gradients, run=self.run)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather a batch's results, without the results of samples that only padded it.

        Collective. See `ops.gather_for_metrics`.
        """
        return ops.gather_for_metrics(input_data, use_gather_object, run=self.run)

    def reduce(
        self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0, *, gradients: bool = False
    ) -> Any:
        """Reduce each tensor over the ranks that have a loss of their own.

        Collective. See `ops.reduce`, whose default is "mean". Accelerate has the same two defaults.
        """
        return ops.reduce(tensor, reduction, scale, gradients=gradients, run=self.run)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Overwrite each tensor, in place, with the tensor of rank `from_process`.

        Collective. See `ops.broadcast`.
        """
        return ops.broadcast(tensor, from_process, run=self.run)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad each tensor along `dim` to the longest of all readers.

        Collective. See `ops.pad_across_processes`.
        """
        return ops.pad_across_processes(tensor, dim, pad_index, pad_first, run=self.run)

    def wait_for_everyone(self) -> None:
        """Return once every rank has called this.

        Collective. See `ops.wait_for_everyone`.
        """
        ops.wait_for_everyone(run=self.run)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context that yields this reader's contiguous part of a sequence, tensor, array or dict.

        Not collective. See `ops.split_between_processes`.
        """
        self.run.require_alive()
        return ops.split_between_processes(inputs, apply_padding, run=self.run)

    def any(self, flag: bool | torch.Tensor) -> bool:
        """Return True if `flag` is true on any rank, for example for a batch that all ranks must skip.

        Collective: one number per rank. Waits for a device if `flag` is a tensor (one element) on it.
        """
        return any(self._flags("any", flag))

    def all(self, flag: bool | torch.Tensor) -> bool:
        """Return True if `flag` is true on all ranks. Collective, as `any`."""
        return all(self._flags("all", flag))

    def _flags(self, name: str, flag: bool | torch.Tensor) -> list[bool]:
        # item() refuses several flags, which bool() of a list would take for true.
        own = torch.as_tensor(flag, device="cpu").item()
        with collective_call(self.run, "world", name, None, objects=True) as call:
            return call.all_objects(bool(own))

    def set_trigger(self) -> None:
        """Make the next `check_trigger` return True on every rank. Call it on any rank, at any time."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Return True if any rank called `set_trigger` since the last check. Collective."""
        flag, self._triggered = self._triggered, False
        return self.any(flag)

    # -- rank-aware running ----------------------------------------------------------------------

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, on the main process only."""
        if self.is_main_process:
            print(*values, **options)  # noqa: T201  the method's purpose

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main process run the block before all others. Collective."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each node run the block before the others. Collective."""
        return self._first(self.is_local_main_process)

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:
                self.wait_for_everyone()

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the main process only; on other ranks the call returns None."""
        return _only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the first process of each node only."""
        return _only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the last process only."""
        return _only(function, lambda: self.is_last_process)

    def on_process(self, function: Callable[P, R] | None = None, process_index: int = 0) -> Any:
        """Decorate a function to run on rank `process_index` only."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only(function, lambda: self.process_index == process_index)

    def on_local_process(self, function: Callable[P, R] | None = None, local_process_index: int = 0) -> Any:
        """Decorate a function to run on local rank `local_process_index` of each node only."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _only(function, lambda: self.local_process_index == local_process_index)


def _only(function: Callable[P, R], here: Callable[[], bool]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if here() else None

    return run
