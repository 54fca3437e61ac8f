"""Ulysses sequence parallelism.

Ranks that share a sequence read the same batch, and each has the next part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from accel_core import AccelError, MeshDim, hooks, implements

if TYPE_CHECKING:
    from accel_core import Run, RunConfig, Unit, World

__all__ = ["SharedSequences"]


class SharedSequences:
    """`sharing` ranks share each sequence; 1: none does."""

    run: Run
    sharing: int

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config: RunConfig, world: World) -> Sequence[MeshDim]:
        return [MeshDim("cp", self.sharing)] if self.sharing > 1 else []

    @implements(hooks.place_batch)
    def place_batch(self, unit: Unit | None, batch: Any, device: torch.device) -> Any:
        if self.sharing == 1 or self.run.mesh is None:
            return batch
        return _part(batch, self.run.mesh.index("cp"), self.sharing)


def _part(batch: Any, rank: int, ranks: int) -> Any:
    """Return this rank's part of each sequence: of each tensor's second dimension.

    What follows from whole sequences is added where transformers asks for it: positions, and labels that
    are shifted already, because a loss that shifts by itself loses the token after each part.

    Raises:
        AccelError: a sequence has no parts of one length.
    """
    if isinstance(batch, Mapping):
        batch = {**batch, **_whole(batch)}

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        if value.shape[1] % ranks:
            raise AccelError(
                f"sequence_parallel_size is {ranks}, and a batch has the shape {list(value.shape)}\n"
                f"pad sequences (dimension 1) to a multiple of {ranks} in the collate function"
            )
        return value.chunk(ranks, 1)[rank]

    return tree_map(cut, batch)


def _whole(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    found, ids, labels = {}, batch.get("input_ids"), batch.get("labels")
    if ids is not None and "position_ids" not in batch:
        found["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    if labels is not None and "shift_labels" not in batch:
        found["shift_labels"] = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return found
