"""Splits the sequences of each batch; attention still sees them whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from accel_context_parallel.attention import attending
from accel_context_parallel.models import (
    Asked,
    PositionArgument,
    attend_causally,
    refuse_unshifted_labels,
)
from accel_context_parallel.sequence import length_of, part, places, positions
from accel_core import AccelError, MeshDim, get_logger, hooks, implements

if TYPE_CHECKING:
    from accel_context_parallel.config import ContextParallelPlugin
    from accel_core import Run, RunConfig, Unit, World

__all__ = ["ContextParallel"]

_logger = get_logger(__name__)

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""Entries by which collate functions tell documents of one row apart."""


class ContextParallel:
    """Mesh dimension `cp`.

    Its ranks read the same samples, and have parts of their sequences.
    """

    below: Any

    def __init__(self, config: ContextParallelPlugin, run: Run) -> None:
        self.config, self.run = config, run
        self._parts: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Tensor with a part of sequences -> length of the whole; ends with its batch."""
        self._given = 0
        """Whole length for the forward that begins; 0 if its inputs hold no parts."""
        self._shared = 0
        """Whole length of the sequences of the step that runs; 0 outside of steps."""
        self._restarts: Tensor | None = None
        """Flag on a device: a batch holds packed rows. Read at the next batch."""

    @property
    def ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.run.mesh.size("cp") if self.run.mesh else 1

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config: RunConfig, world: World) -> Sequence[MeshDim]:
        return [MeshDim("cp", config.parallelism.get("cp", 1))]

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if self.ranks > 1 and phase == "convert":
            attend_causally(model, lambda: self._shared > 0)
            note = partial(self._note, PositionArgument(model))
            model.register_forward_pre_hook(Asked(torch.compiler.disable(note)), with_kwargs=True)
        return model

    def _note(self, argument: PositionArgument, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._given = given = self._length_in((args, kwargs))
        if length := self._shared or given:
            refuse_unshifted_labels(module, kwargs)
            return self._with_positions(argument, args, kwargs, length, has_parts=given > 0)
        return None

    def _with_positions(
        self, argument: PositionArgument, args: Any, kwargs: Any, length: int, *, has_parts: bool
    ) -> Any:
        """Return the arguments of a forward with the positions of its tokens, if it lacks them."""
        assert self.run.mesh is not None
        if argument.index is None:
            if has_parts and self.config.derive and not argument.is_elsewhere:
                where = positions(length, self.ranks, self.run.device)[self.run.mesh.index("cp")]
                argument.find_elsewhere(tree_leaves((args, kwargs)), where)
            return None
        dim = self.config.buffers.get("input_ids", 1)
        tokens = argument.tokens_without(args, kwargs)
        if tokens is None or tokens.dim() < 2 or tokens.shape[dim] * self.ranks != length:
            return None
        where = positions(length, self.ranks, tokens.device)[self.run.mesh.index("cp")]
        return argument.filled(args, kwargs, places(where, tokens, dim))

    def _length_in(self, batch: Any) -> int:
        """Whole length of the sequences that a batch's tensors are parts of, or 0."""
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                for tensor in (leaf, leaf._base):
                    if tensor is not None and tensor in self._parts:
                        return int(self._parts[tensor])
        return 0

    # -- batches ---------------------------------------------------------------------------------

    @implements(hooks.place_batch)
    def place_batch(self, unit: Unit | None, batch: Any, device: torch.device) -> Any:
        if self.ranks == 1:
            return batch
        named = batch if isinstance(batch, Mapping) else _numbered(batch)
        dims = {name: dim for name, dim in self.config.buffers.items() if name in named}
        self._refuse_packed(named)
        if not dims:
            if self.config.buffers:
                _logger.warning_once(
                    "cp: batches have none of %s: each of %d ranks computes all of them",
                    ", ".join(self.config.buffers),
                    self.ranks,
                )
            return batch
        length = length_of(named, dims, self.ranks)
        parts = self._parts_of(named, dims, length)
        for tensor in parts.values():
            self._parts[tensor] = length
        return _with(batch, {**named, **parts})

    def _refuse_packed(self, batch: Mapping[str, Any]) -> None:
        """Raise AccelError.

        Rows hold several documents, each of which would see the others.
        """
        found = [name for name in PACKED if batch.get(name) is not None]
        where = batch.get("position_ids")
        doubt, self._restarts = self._restarts, None
        if isinstance(where, Tensor) and "position_ids" in self.config.buffers:
            self._restarts = (where.diff(dim=self.config.buffers["position_ids"]) != 1).any()
            if where.device.type == "cpu":
                doubt, self._restarts = self._restarts, None
        if found or (doubt is not None and doubt.item()):
            what = ", ".join(found) or "position_ids that do not rise by one"
            raise AccelError(
                f"cp: packed rows ({what}): each document would attend to those before it in its row\n"
                "give each document a row of its own, padded on the right, or train without cp"
            )

    def _parts_of(self, batch: Mapping[str, Any], dims: Mapping[str, int], length: int) -> dict[str, Tensor]:
        """Return this rank's part of each entry with a sequence.

        It also makes the entries that follow from a sequence: position ids, shifted labels.
        """
        assert self.run.mesh is not None
        rank = self.run.mesh.index("cp")
        whole = {name: batch[name] for name in dims}
        if self.config.derive and "labels" in whole and "shift_labels" not in batch:
            # A loss that shifts by itself would lose the token after each piece.
            dims = {**dims, "shift_labels": dims["labels"]}
            whole["shift_labels"] = whole["labels"].roll(-1, dims["labels"])
            whole["shift_labels"].select(dims["labels"], -1).fill_(-100)
        parts = {name: part(tensor, dims[name], rank, self.ranks) for name, tensor in whole.items()}
        if self.config.derive and "input_ids" in whole and "position_ids" not in batch:
            where = positions(length, self.ranks, parts["input_ids"].device)[rank]
            parts["position_ids"] = places(where, parts["input_ids"], dims["input_ids"])
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
        shared = self._length_in(buffers)
        if shared or not buffers or len(buffers) != len(dims):
            found = "the loader has shared this batch out already" if shared else "what has a sequence?"
            raise AccelError(
                f"maybe_context_parallel with {len(buffers)} buffers, {len(dims)} dimensions: {found}\n"
                "name each buffer's dimension, and keep loaders from sharing batches out: cp.buffers: {}"
            )
        named = {str(number): buffer for number, buffer in enumerate(buffers)}
        length = length_of(named, dict(zip(named, dims, strict=True)), self.ranks)
        whole = [buffer.data for buffer in buffers]
        for buffer, data, dim in zip(buffers, whole, dims, strict=True):  # one may be there twice
            buffer.data = part(data, dim, self.run.mesh.index("cp"), self.ranks)
            self._parts[buffer] = length
        try:
            with self._attend(length):
                yield
        finally:
            left = set(map(id, kept))
            for buffer, data in zip(buffers, whole, strict=True):
                self._parts.pop(buffer, None)
                if id(buffer) not in left:
                    buffer.data = data

    # -- attention -------------------------------------------------------------------------------

    @implements(hooks.step_context)
    def step_context(self, unit: Unit, batch: Any) -> AbstractContextManager[None]:
        length = self._length_in(batch) if self.ranks > 1 else 0
        if not length and self.ranks > 1:
            named = batch if isinstance(batch, Mapping) else _numbered(batch)
            if unknown := [name for name in self.config.buffers if isinstance(named.get(name), Tensor)]:
                raise AccelError(
                    f"cp: no prepared dataloader gave this step's batch ({', '.join(unknown)}), and whether"
                    " its tensors are parts of sequences is not known\npass the loader's own batch:"
                    " accelerator.accumulate(model, batch=batch)"
                )
        return self._attend(length)

    @implements(hooks.autocast)
    def autocast(self, unit: Unit) -> Callable[[], AbstractContextManager[None]] | None:
        """Not to cast: a forward that no step surrounds is seen here."""
        return self._forward if self.ranks > 1 else None

    def _forward(self) -> AbstractContextManager[None]:
        length, self._given = self._given, 0
        if len(self._parts) and not self._shared and torch.is_grad_enabled():
            raise AccelError(
                "cp: a model trains on its part of each sequence outside of any step\n"
                "write `with accelerator.accumulate(model, batch=batch):` around forward and backward, or use"
                " accelerator.forward_backward"
            )
        return self._attend(length)

    @contextmanager
    def _attend(self, length: int) -> Iterator[None]:
        if self._shared or not length:
            yield
            return
        assert self.run.mesh is not None
        self._shared = length
        try:
            with attending(self.run.mesh.device_mesh["cp"], length, self._anyone):
                yield
        finally:
            self._shared = 0

    def _anyone(self, called: bool) -> bool:
        """Return True if any stage of a pipeline did; some have no attention. Collective."""
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
    """Return a batch of the same class with these entries."""
    if isinstance(batch, Mapping):
        made: Any = copy.copy(batch)
        made.update(entries)
        return made
    values = list(entries.values())
    if not isinstance(batch, (tuple, list)):
        return values[0]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
