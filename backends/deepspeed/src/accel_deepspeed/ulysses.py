"""Ulysses sequence parallelism.

Ranks that share a sequence read the same batch, and each has the next part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from accel_core import AccelError, MeshDim, hooks, implements

if TYPE_CHECKING:
    from accel_core import Run, RunConfig, Unit, World

__all__ = ["SharedSequences", "require_exchange"]


class SharedSequences:
    """Ranks share each sequence if the run has dimension `sp`."""

    run: Run
    asked: int
    """Size of `sp`: of section `parallelism`, or of the JSON's `sequence_parallel_size`; -1: the rest."""

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config: RunConfig, world: World) -> Sequence[MeshDim]:
        return [MeshDim("sp", self.asked)] if self.asked != 1 else []

    @property
    def sharing(self) -> int:
        """Number of ranks that share each sequence."""
        return 1 if self.run.mesh is None else self.run.mesh.size("sp")

    @implements(hooks.place_batch)
    def place_batch(self, unit: Unit | None, batch: Any, device: torch.device) -> Any:
        if self.sharing == 1 or self.run.mesh is None:
            return batch
        return _part(batch, self.run.mesh.index("sp"), self.sharing)


class _Exchanges(TorchDispatchMode):
    """Notes if code inside exchanges heads: each way of Ulysses is an all-to-all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.found |= "alltoall" in func.name().replace("_", "")
        return func(*args, **(kwargs or {}))


def require_exchange(model: nn.Module, ranks: int) -> None:
    """Have the model's first forward that trains raise AccelError if it exchanges no heads.

    Later forwards are not watched.
    """
    watching, exchanges = ExitStack(), _Exchanges()

    def begin(*_: Any) -> None:
        if torch.is_grad_enabled():
            watching.enter_context(exchanges)
            before.remove()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation, which may come first
        after.remove()
        watching.close()
        if output is not None and not exchanges.found:
            raise AccelError(
                f"parallelism.sp is {ranks}, and the forward of {type(module).__name__} exchanges no"
                " heads between the ranks that share a sequence: each attends to its own part alone\nlet it"
                " attend by deepspeed.sequence.layer.DistributedAttention or, in transformers,"
                " UlyssesSPAttentionHF; or set parallelism.sp: 1"
            )

    before = model.register_forward_pre_hook(begin)
    after = model.register_forward_hook(end, always_call=True)  # after an exception too


def _part(batch: Any, rank: int, ranks: int) -> Any:
    """Return this rank's part of each sequence: of each tensor's second dimension.

    Entries that depend on whole sequences are added for transformers: positions, and labels that
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
                f"parallelism.sp is {ranks}, and a batch has the shape {list(value.shape)}\n"
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
