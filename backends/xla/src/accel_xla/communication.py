"""Collectives of XLA.

Operations in the recorded graph, between replicas that XLA numbers by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from accel_core import Collectives

__all__ = ["XlaCollectives"]

_KINDS: Final = {"sum": "sum", "mean": "sum", "min": "min", "max": "max"}


class XlaCollectives:
    """Tensors travel by XLA, objects over `control`, core's group on the CPU.

    XLA's ordinals need not be the launcher's ranks: all ranks tell each other theirs, once.
    """

    group = None

    def __init__(self, control: Collectives) -> None:
        from torch_xla import runtime
        from torch_xla.core import xla_model

        self._xm, self._control = xla_model, control
        self.rank, self.size = control.rank, control.size
        self._ordinals = list(control.all_gather_object(runtime.global_ordinal()))
        """Rank -> XLA's ordinal."""
        self._orderly = self._ordinals == sorted(self._ordinals)

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        """Reduce in place."""
        scale = 1.0 / self.size if operation == "mean" else 1.0
        self._xm.all_reduce(_KINDS[operation], [tensor], scale=scale)  # a list is reduced in place
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(n, ...) on each rank -> (size * n, ...), in rank order."""
        gathered: Tensor = self._xm.all_gather(tensor, pin_layout=False)
        if self._orderly:
            return gathered
        by_ordinal = gathered.view(self.size, *tensor.shape)
        return by_ordinal[torch.tensor(self._ordinals, device=tensor.device)].reshape(gathered.shape)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` with that of rank `source`, in place."""
        self._xm.collective_broadcast([tensor], self._ordinals[source], pin_layout=False)
        return tensor

    def all_gather_object(self, value: Any) -> Sequence[Any]:
        """Every rank's picklable value, in rank order."""
        return self._control.all_gather_object(value)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the picklable value of rank `source`."""
        return self._control.broadcast_object(value, source)

    def barrier(self) -> None:
        """Return once every rank is here."""
        self._control.barrier()
