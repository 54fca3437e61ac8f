"""Shares out the sequences of each batch, and lets attention see the whole of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_context_parallel.attention import attending
from accel_context_parallel.models import attend_causally
from accel_context_parallel.sequence import length_of, part, positions
from accel_core import AccelError, MeshDim, get_logger, hooks, implements

if TYPE_CHECKING:
    from accel_context_parallel.config import ContextParallelPlugin
    from accel_core import Run, RunConfig, Unit, World

__all__ = ["ContextParallel"]

_logger = get_logger(__name__)


class ContextParallel:
    """Mesh dimension `cp`: its ranks read the same samples, and have parts of their sequences."""

    below: Any

    def __init__(self, config: ContextParallelPlugin, run: Run) -> None:
        self.config, self.run = config, run
        self._length = 0
        """Tokens of the last batch's sequences; 0 where it has none to share."""
        self._attending = False

    @property
    def ranks(self) -> int:
        """How many share a sequence."""
        return self.run.mesh.size("cp") if self.run.mesh else 1

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config: RunConfig, world: World) -> Sequence[MeshDim]:
        return [MeshDim("cp", self.config.size)]

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if self.ranks > 1 and phase == "convert":
            attend_causally(model)
        return model

    # -- batches ---------------------------------------------------------------------------------

    @implements(hooks.place_batch)
    def place_batch(self, unit: Unit | None, batch: Any, device: torch.device) -> Any:
        if self.ranks == 1:
            return batch
        named = batch if isinstance(batch, Mapping) else _numbered(batch)
        dims = {name: dim for name, dim in self.config.buffers.items() if name in named}
        self._length = length_of(named, dims, self.ranks) if dims else 0
        if not dims:
            if self.config.buffers:
                _logger.warning_once(
                    "cp: batches have none of %s: each of %d ranks computes all of them",
                    ", ".join(self.config.buffers),
                    self.ranks,
                )
            return batch
        return _with(batch, {**named, **self._parts(named, dims)})

    def _parts(self, batch: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Tensor]:
        """This rank's part of each entry that has a sequence, and of those that follow from them."""
        assert self.run.mesh is not None
        rank = self.run.mesh.index("cp")
        whole = {name: batch[name] for name in dims}
        if self.config.derive and "labels" in whole and "shift_labels" not in batch:
            # A loss that shifts by itself would lose the token after each piece.
            whole["shift_labels"] = nn.functional.pad(whole["labels"], (0, 1), value=-100)[:, 1:]
        parts = {name: part(tensor, dims.get(name, 1), rank, self.ranks) for name, tensor in whole.items()}
        if self.config.derive and "input_ids" in whole and "position_ids" not in batch:
            where = positions(self._length, self.ranks, whole["input_ids"].device)[rank]
            parts["position_ids"] = where.expand(len(whole["input_ids"]), -1)
        return parts

    @implements(hooks.share_sequences)
    def share_sequences(
        self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
    ) -> AbstractContextManager[None]:
        return self._share(buffers, dims, kept) if self.ranks > 1 else nullcontext()

    @contextmanager
    def _share(
        self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
    ) -> Iterator[None]:
        assert self.run.mesh is not None
        if self._length or not buffers or len(buffers) != len(dims):
            found = "the loader has shared this batch out already" if self._length else "what has a sequence?"
            raise AccelError(
                f"maybe_context_parallel with {len(buffers)} buffers, {len(dims)} dimensions: {found}\n"
                "name each buffer's dimension, and keep loaders from sharing batches out: cp.buffers: {}"
            )
        named = {str(number): buffer for number, buffer in enumerate(buffers)}
        self._length = length_of(named, dict(zip(named, dims, strict=True)), self.ranks)
        whole = [buffer.data for buffer in buffers]
        for buffer, dim in zip(buffers, dims, strict=True):
            buffer.data = part(buffer.data, dim, self.run.mesh.index("cp"), self.ranks)
        try:
            with self._attend():
                yield
        finally:
            self._length = 0
            left = set(map(id, kept))
            for buffer, data in zip(buffers, whole, strict=True):
                if id(buffer) not in left:
                    buffer.data = data

    # -- attention -------------------------------------------------------------------------------

    @implements(hooks.step_context)
    def step_context(self, unit: Unit, batch: Any) -> AbstractContextManager[None]:
        return self._attend()

    @implements(hooks.autocast)
    def autocast(self, unit: Unit) -> Callable[[], AbstractContextManager[None]] | None:
        """Not to cast: a forward that no step surrounds is seen here."""
        return self._forward if self.ranks > 1 else None

    def _forward(self) -> AbstractContextManager[None]:
        if self._length and not self._attending and torch.is_grad_enabled():
            raise AccelError(
                "cp: a model trains on its part of each sequence outside of any step\n"
                "write `with accelerator.accumulate(model, batch=batch):` around forward and backward, or use"
                " accelerator.forward_backward"
            )
        return self._attend()

    @contextmanager
    def _attend(self) -> Iterator[None]:
        if self._attending or not self._length:
            yield
            return
        assert self.run.mesh is not None
        self._attending = True
        try:
            with attending(self.run.mesh.device_mesh["cp"], self._length, self._anyone):
                yield
        finally:
            self._attending = False

    def _anyone(self, called: bool) -> bool:
        """Whether any stage of a pipeline did, of which some may have no attention. Collective."""
        assert self.run.mesh is not None
        names = [name for name in self.run.mesh.names("model") if self.run.mesh.size(name) > 1]
        if not names:
            return called
        told = torch.tensor(float(called), device=self.run.device)
        return bool(self.run.collectives("+".join(names)).all_reduce(told, "max"))


def _numbered(batch: Any) -> dict[str, Any]:
    values = batch if isinstance(batch, (tuple, list)) else (batch,)
    return {str(number): value for number, value in enumerate(values)}


def _with(batch: Any, entries: Mapping[str, Any]) -> Any:
    """A batch of the same class with these entries."""
    if isinstance(batch, Mapping):
        made: Any = copy.copy(batch)
        made.update(entries)
        return made
    values = list(entries.values())
    if not isinstance(batch, (tuple, list)):
        return values[0]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
