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

from accel_context_parallel.attention import RING_DEVICES, Rings, Sequences, install, running_in
from accel_context_parallel.models import (
    Argument,
    Asked,
    PositionArgument,
    refuse_unshifted_labels,
    tokens_in,
)
from accel_context_parallel.registered import attend_by_cp, pretrained, refused
from accel_context_parallel.sequence import (
    Part,
    Rows,
    documents_between,
    length_of,
    part,
    places,
    positions,
)
from accel_core import AccelError, MeshDim, get_logger, hooks, implements

if TYPE_CHECKING:
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
        self._parts: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Tensor with a part of sequences -> its `Part`; ends with its batch."""
        self._given = 0
        """Whole length for the forward that begins; 0 if its inputs hold no parts."""
        self._rows = Rows()
        """Rows of the forward of a model of transformers that begins, or of the last one."""
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
        return [MeshDim("cp", self.config.size)]

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        if self.ranks == 1:
            return ()
        reasons = [reason for model in models for each in pretrained(model) for reason in refused(each)]
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
            self._hook(model, partial(self._note, PositionArgument(model)))
            for each in pretrained(model):
                attend_by_cp(each)
                where, mask = Argument(each, "position_ids"), Argument(each, "attention_mask")
                self._hook(each, partial(self._note_rows, where, mask))
        return model

    @staticmethod
    def _hook(model: nn.Module, note: Callable[..., Any]) -> None:
        model.register_forward_pre_hook(Asked(torch.compiler.disable(note)), with_kwargs=True)

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        if self._rings is not None:
            self._rings.close()
            self._rings = None

    # -- arguments of forwards -------------------------------------------------------------------

    def _note(self, argument: PositionArgument, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._given = self._length_in((args, kwargs))
        if length := self._length_running or self._given:
            refuse_unshifted_labels(module, kwargs)
            return self._with_positions(argument, args, kwargs, length, has_parts=self._given > 0)
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
        tokens = tokens_in(args, kwargs)
        if argument.get(args, kwargs) is not None or tokens is None or not self._is_part(tokens, length):
            return None
        where = positions(length, self.ranks, tokens.device)[self.run.mesh.index("cp")]
        return argument.put(args, kwargs, places(where, tokens, self.config.buffers.get("input_ids", 1)))

    def _note_rows(self, where: Argument, mask: Argument, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Find the documents and the padding of a model of transformers, and give it the mask of its part.

        A mask is passed always: without one transformers looks for documents between the positions of the
        part, and the host waits for the device.
        """
        length, tokens = self._length_running or self._given, tokens_in(args, kwargs)
        found, self._rows = mask.get(args, kwargs), Rows()
        if length and tokens is not None and self._is_part(tokens, length):
            assert self.run.mesh is not None
            documents = self._documents_of(where.get(args, kwargs), kwargs, tokens, length)
            if found is None:
                found = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
                self._rows = Rows(documents)
            else:
                self._rows = Rows(documents, self._padding_of(found, length))
                is_whole = found.shape[1] == length
                found = part(found, 1, self.run.mesh.index("cp"), self.ranks) if is_whole else found
            if mask.index is not None:
                args, kwargs = mask.put(args, kwargs, found)
        if self._running is not None:
            self._running.rows = self._rows
        return args, kwargs

    def _documents_of(
        self, where: Any, kwargs: Mapping[str, Any], tokens: Tensor, length: int
    ) -> Tensor | None:
        if isinstance(boundaries := kwargs.get("cu_seq_lens_q"), Tensor):
            if len(tokens) != 1:
                raise AccelError(
                    f"cp: cu_seq_lens_q with a batch of {len(tokens)} rows; its numbers are for one row\n"
                    "give the model one row, or position_ids that restart with each document"
                )
            return documents_between(boundaries, length)
        known = None if where is None else self._part_of(where)
        return None if known is None else self._warned(known.documents, "position_ids")

    def _padding_of(self, mask: Any, length: int) -> Tensor | None:
        whole = Part(length, mask) if mask.dim() == 2 and mask.shape[1] == length else self._part_of(mask)
        if whole is None or mask.dim() != 2:
            raise AccelError(
                f"cp: an attention_mask of shape {tuple(mask.shape)}; {self.ranks} ranks share sequences of"
                f" {length}, and a mask says which tokens are padding\npass the batch's own attention_mask,"
                " of shape (batch, sequence)"
            )
        return self._warned(whole.kept, "an attention_mask")

    def _warned(self, found: Tensor | None, name: str) -> Tensor | None:
        if found is not None and self.run.device.type in RING_DEVICES:
            _logger.warning_once(
                "cp: batches have %s, so that attention takes masks of (sequence / %d ranks) x sequence"
                " instead of torch's ring attention: leave the entry out if rows hold one document without"
                " padding",
                name,
                self.ranks,
            )
        return found

    def _is_part(self, tokens: Tensor, length: int) -> bool:
        dim = self.config.buffers.get("input_ids", 1)
        return tokens.dim() > 1 and tokens.shape[dim] * self.ranks == length

    @property
    def _length_running(self) -> int:
        return 0 if self._running is None else self._running.length

    def _length_in(self, batch: Any) -> int:
        """Return the whole length of the sequences that a batch's tensors are parts of, or 0."""
        leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        found = next((known for leaf in leaves if (known := self._part_of(leaf))), None)
        return 0 if found is None else found.length

    def _part_of(self, tensor: Tensor) -> Part | None:
        for each in (tensor, tensor._base):
            if each is not None and each in self._parts:
                known: Part = self._parts[each]
                return known
        return None

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
            self._know(tensor, length, named.get(name))
        return _with(batch, {**named, **parts})

    def _know(self, tensor: Tensor, length: int, whole: Tensor | None) -> None:
        self._parts[tensor] = Part(length, None if whole is None or whole.is_floating_point() else whole)

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
            self._know(buffer, length, data)
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
        return self._attend(length, unit)

    @implements(hooks.autocast)
    def autocast(self, unit: Unit) -> Callable[[], AbstractContextManager[None]] | None:
        """Return the context of forwards: in it, forwards that no step surrounds are seen."""
        return self._forward if self.ranks > 1 else None

    def _forward(self) -> AbstractContextManager[None]:
        length, self._given = self._given, 0
        if len(self._parts) and self._running is None and torch.is_grad_enabled():
            raise AccelError(
                "cp: a model trains on its part of each sequence outside of any step\n"
                "write `with accelerator.accumulate(model, batch=batch):` around forward and backward, or use"
                " accelerator.forward_backward"
            )
        return self._attend(length)

    @contextmanager
    def _attend(self, length: int, unit: Unit | None = None) -> Iterator[None]:
        if self._running is not None or not length:
            yield
            return
        assert self.run.mesh is not None
        mesh, method = self.run.mesh.device_mesh["cp"], self.config.rotate_method
        if self._rings is None and mesh.device_type in RING_DEVICES:
            self._rings = Rings(mesh, method)
        self._running = sequences = Sequences(mesh, length, self._rings, only_rings=method == "alltoall")
        sequences.rows = self._rows
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
