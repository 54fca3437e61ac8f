"""Splits the sequences of each batch; attention still sees them whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_context_parallel.attention import RING_DEVICES, Rings, Sequences, install, running_in
from accel_context_parallel.forwards import Forwards, Parts
from accel_context_parallel.models import (
    Argument,
    Asked,
    PositionArgument,
    own_positions,
)
from accel_context_parallel.registered import attend_by_cp, pretrained, refused
from accel_context_parallel.sequence import (
    length_of,
    part,
    places,
    positions,
)
from accel_core import AccelError, MeshDim, get_logger, hooks, implements

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_context_parallel.config import ContextParallelPlugin
    from accel_core import Run, RunConfig, Unit, World

__all__ = ["ContextParallel"]

_logger = get_logger(__name__)


class ContextParallel:
    """Mesh dimension `cp`: its ranks read the same samples, and have parts of their sequences."""

    below: Any

    def __init__(self, config: ContextParallelPlugin, run: Run) -> None:
        self.config, self.run = config, run
        self._parts = Parts()
        self._forwards = Forwards(config, run, self._parts)
        self._running: Sequences | None = None
        """The sequences of the step that runs; None outside of steps."""
        self._rings: Rings | None = None
        self._attended: set[Unit | None] = set()
        """Units of pipelines of which some stage has attended."""

    @property
    def ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.run.mesh.size("cp") if self.run.mesh else 1

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config: RunConfig, world: World) -> Sequence[MeshDim]:
        return [MeshDim("cp", config.parallelism.get("cp", 1))]

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        if self.ranks == 1:
            return ()
        reasons = [reason for model in models for each in pretrained(model) for reason in refused(each)]
        if self.config.derive:
            reasons += [reason for model in models for reason in own_positions(model)]
        device = self.run.device.type
        if self.config.rotate_method == "alltoall" and device not in RING_DEVICES:
            reasons.append(
                f"cp.rotate_method is alltoall, which torch's ring attention does not serve on {device}\n"
                "set cp.rotate_method: allgather"
            )
        return reasons

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if self.ranks > 1 and phase == "convert":
            install()
            self._hook(model, partial(self._forwards.note, PositionArgument(model)))
            for each in pretrained(model):
                attend_by_cp(each)
                where, mask = Argument(each, "position_ids"), Argument(each, "attention_mask")
                self._hook(each, partial(self._forwards.note_rows, where, mask))
        return model

    @staticmethod
    def _hook(model: nn.Module, note: Callable[..., Any]) -> None:
        model.register_forward_pre_hook(Asked(torch.compiler.disable(note)), with_kwargs=True)

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        if self._rings is not None:
            self._rings.close()
            self._rings = None

    # -- batches ---------------------------------------------------------------------------------

    @implements(hooks.place_batch)
    def place_batch(self, unit: Unit | None, batch: Any, device: torch.device) -> Any:
        if self.ranks == 1:
            return batch
        named = batch if isinstance(batch, Mapping) else _numbered(batch)
        dims = {name: dim for name, dim in self.config.buffers.items() if name in named}
        self._refuse_rows(named)
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
        for name, tensor in parts.items():
            whole = named.get(name)
            if name == "attention_mask" and whole is not None:
                whole = whole.bool()  # some tokenizers' masks are float
            self._parts.add(tensor, length, whole)
        return _with(batch, {**named, **parts})

    def _refuse_rows(self, batch: Mapping[str, Any]) -> None:
        """Refuse rows that no layer could tell apart."""
        assert self.run.mesh is not None
        if batch.get("seq_idx") is not None:
            raise AccelError(
                "cp: packed rows (seq_idx), which recurrent layers read; cp serves attention only\n"
                "leave seq_idx out, and tell documents apart by position_ids that restart"
            )
        entries = ("attention_mask", "position_ids", "cu_seq_lens_q")
        if found := [
            name for name in entries if self.run.mesh.size("pp") > 1 and batch.get(name) is not None
        ]:
            raise AccelError(
                f"cp: batches with {', '.join(found)}, of which the later stages of a pipeline know nothing\n"
                "leave the entries out: cp makes positions, and causal attention needs no mask of padding on"
                " the right; give each document a row of its own"
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
        shared = self._parts.length_in(buffers)
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
            self._parts.add(buffer, length, data)
        try:
            with self._attend(length):
                yield
        finally:
            left = set(map(id, kept))
            for buffer, data in zip(buffers, whole, strict=True):
                self._parts.drop(buffer)
                if id(buffer) not in left:
                    buffer.data = data

    # -- attention -------------------------------------------------------------------------------

    @implements(hooks.step_context)
    def step_context(self, unit: Unit, batch: Any) -> AbstractContextManager[None]:
        length = self._parts.length_in(batch) if self.ranks > 1 else 0
        if not length and self.ranks > 1:
            named = batch if isinstance(batch, Mapping) else _numbered(batch)
            if unknown := [name for name in self.config.buffers if isinstance(named.get(name), Tensor)]:
                raise AccelError(
                    f"cp: no prepared dataloader gave this step's batch ({', '.join(unknown)}), and whether"
                    " its tensors are parts of sequences is not known\npass the loader's own batch:"
                    " accelerator.accumulate(model, batch=batch)"
                )
        return self._attend(length, unit)

    @implements(hooks.autocast)
    def autocast(self, unit: Unit) -> Callable[[], AbstractContextManager[None]] | None:
        """Return the context of forwards: in it, forwards that no step surrounds are seen."""
        return self._forward if self.ranks > 1 else None

    def _forward(self) -> AbstractContextManager[None]:
        length, self._forwards.length = self._forwards.length, 0
        if len(self._parts) and self._running is None and torch.is_grad_enabled():
            raise AccelError(
                "cp: a model trains on its part of each sequence outside of any step\n"
                "write `with accelerator.accumulate(model, batch=batch):` around forward and backward, or use"
                " accelerator.forward_backward"
            )
        return self._attend(length)

    @cached_property
    def _mesh(self) -> DeviceMesh:
        """The ranks that share sequences. To slice a mesh reads numbers, so that it happens once."""
        assert self.run.mesh is not None
        mesh: DeviceMesh = self.run.mesh.device_mesh["cp"]
        return mesh

    @contextmanager
    def _attend(self, length: int, unit: Unit | None = None) -> Iterator[None]:
        if self._running is not None or not length:
            yield
            return
        mesh, method = self._mesh, self.config.rotate_method
        if self._rings is None and mesh.device_type in RING_DEVICES:
            self._rings = Rings(mesh, method)
        self._running = sequences = Sequences(mesh, length, self._rings, only_rings=method == "alltoall")
        sequences.rows = self._forwards.rows
        try:
            with running_in(sequences):
                yield
        finally:
            self._running = None
        if not self._has_attended(sequences, unit):
            raise AccelError(
                "cp: the model never called torch.nn.functional.scaled_dot_product_attention: it saw only"
                " this rank's part of each sequence\nlet its attention call it, by this name (transformers:"
                ' attn_implementation="sdpa"), or train without cp'
            )

    def _has_attended(self, sequences: Sequences, unit: Unit | None) -> bool:
        """Return True if some layer has attended. Collective in the first window of a pipeline."""
        assert self.run.mesh is not None
        if self.run.mesh.size("pp") == 1:
            return sequences.attended
        if unit not in self._attended:  # some stages have no attention, and ranks agree once
            attended = torch.tensor(float(sequences.attended), device=self.run.device)
            if not self.run.collectives("pp").all_reduce(attended, "max"):
                return False
            self._attended.add(unit)
        return True


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
