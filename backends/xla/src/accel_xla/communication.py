"""Collectives of XLA, which are operations of the recorded graph between replicas with XLA's numbering."""

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
    """Collectives of tensors by XLA, and of objects over `control`, core's group on the CPU.

    XLA's ordinals may differ from the launcher's ranks, so all ranks exchange their ordinals at the start.
    """

    group = None

    def __init__(self, control: Collectives) -> None:
        from torch_xla import runtime
        from torch_xla.core import xla_model

        self._xm, self._control = xla_model, control
        self.rank, self.size = control.rank, control.size
        self._ordinals = list(control.all_gather_object(runtime.global_ordinal()))
        """Rank -> XLA's ordinal."""
        self._is_in_rank_order = self._ordinals == sorted(self._ordinals)

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        """Reduce in place."""
        scale = 1.0 / self.size if operation == "mean" else 1.0
        self._xm.all_reduce(_KINDS[operation], [tensor], scale=scale)  # a list is reduced in place
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the concatenation of all ranks' tensors in rank order: (n, ...) -> (size * n, ...)."""
        gathered: Tensor = self._xm.all_gather(tensor, pin_layout=False)
        if self._is_in_rank_order:
            return gathered
        by_ordinal = gathered.view(self.size, *tensor.shape)
        return by_ordinal[torch.tensor(self._ordinals, device=tensor.device)].reshape(gathered.shape)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` in place with the tensor of rank `source`."""
        self._xm.collective_broadcast([tensor], self._ordinals[source], pin_layout=False)
        return tensor

    def all_gather_object(self, value: Any) -> Sequence[Any]:
        """Return the picklable values of all ranks in rank order."""
        return self._control.all_gather_object(value)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the picklable value of rank `source`."""
        return self._control.broadcast_object(value, source)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._control.barrier()
