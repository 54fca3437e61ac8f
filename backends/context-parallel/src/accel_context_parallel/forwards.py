"""Parts of sequences, and the arguments of the forwards that get them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from accel_context_parallel.attention import RING_DEVICES, running
from accel_context_parallel.models import Argument, PositionArgument, refuse_unshifted_labels, tokens_in
from accel_context_parallel.sequence import Part, Rows, documents_between, part, places, positions
from accel_core import AccelError, get_logger

if TYPE_CHECKING:
    from accel_context_parallel.config import ContextParallelPlugin
    from accel_core import Run

__all__ = ["Forwards", "Parts"]

_logger = get_logger(__name__)


class Parts:
    """The tensors with parts of sequences, until their batches end."""

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, tensor: Tensor, length: int, whole: Tensor | None) -> None:
        """Note a part, and the whole tensor if its numbers may be positions or a mask."""
        self._known[tensor] = Part(length, None if whole is None or whole.is_floating_point() else whole)

    def drop(self, tensor: Tensor) -> None:
        """Forget a part: the tensor is whole again."""
        self._known.pop(tensor, None)

    def of(self, tensor: Tensor) -> Part | None:
        """Return the part that a tensor is, or is a view of."""
        for each in (tensor, tensor._base):
            if each is not None and each in self._known:
                known: Part = self._known[each]
                return known
        return None

    def length_in(self, batch: Any) -> int:
        """Return the whole length of the sequences that a batch's tensors are parts of, or 0."""
        leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        found = next((known for leaf in leaves if (known := self.of(leaf))), None)
        return 0 if found is None else found.length


class Forwards:
    """The arguments of prepared models, before each forward."""

    def __init__(self, config: ContextParallelPlugin, run: Run, parts: Parts) -> None:
        self.config, self.run, self.parts = config, run, parts
        self.length = 0
        """Whole length for the forward that begins; 0 if its inputs hold no parts."""
        self.rows = Rows()
        """Rows of the forward of a model of transformers that begins, or of the last one."""

    def note(self, argument: PositionArgument, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Fill in the positions of a part, and refuse a loss that would shift its labels."""
        self.length = self.parts.length_in((args, kwargs))
        if length := self._running_length or self.length:
            refuse_unshifted_labels(module, kwargs)
            return self._with_positions(argument, args, kwargs, length, has_parts=self.length > 0)
        return None

    def _with_positions(
        self, argument: PositionArgument, args: Any, kwargs: Any, length: int, *, has_parts: bool
    ) -> Any:
        """Return the arguments of a forward with the positions of its tokens, if it lacks them."""
        assert self.run.mesh is not None
        if argument.index is None:
            if has_parts and self.config.derive and not argument.is_elsewhere:
                where = positions(length, self._ranks, self.run.device)[self.run.mesh.index("cp")]
                argument.find_elsewhere(tree_leaves((args, kwargs)), where)
            return None
        tokens = tokens_in(args, kwargs)
        if argument.get(args, kwargs) is not None or tokens is None or not self._is_part(tokens, length):
            return None
        own = positions(length, self._ranks, tokens.device)[self.run.mesh.index("cp")]
        where = places(own, tokens, self.config.buffers.get("input_ids", 1))
        self.parts.add(where, length, None)
        return argument.put(args, kwargs, where)

    def note_rows(self, where: Argument, mask: Argument, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Find the documents and the padding of a model of transformers, and give it the mask of its part.

        A mask is passed always: without one transformers looks for documents between the positions of the
        part, and the host waits for the device.
        """
        length, tokens = self._running_length or self.length, tokens_in(args, kwargs)
        found, self.rows = mask.get(args, kwargs), Rows()
        if length and tokens is not None and self._is_part(tokens, length):
            assert self.run.mesh is not None
            documents = self._documents_of(where.get(args, kwargs), kwargs, tokens, length)
            if found is None:
                found = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
                self.rows = Rows(documents)
            else:
                self.rows = Rows(documents, self._padding_of(found, length))
                is_whole = found.shape[1] == length
                found = part(found, 1, self.run.mesh.index("cp"), self._ranks) if is_whole else found
            if mask.index is not None:
                args, kwargs = mask.put(args, kwargs, found)
        if (sequences := running()) is not None:
            sequences.rows = self.rows
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
        if where is None:
            return None
        if (known := self.parts.of(where)) is None:
            raise AccelError(
                "cp: position_ids that are not the batch's own: it is not known if the positions of whole"
                " rows restart, as in packed rows\npass the tensor of the batch, or leave position_ids to cp"
            )
        return self._warned(known.documents, "position_ids")

    def _padding_of(self, mask: Any, length: int) -> Tensor | None:
        whole = Part(length, mask) if mask.dim() == 2 and mask.shape[1] == length else self.parts.of(mask)
        if whole is None or mask.dim() != 2:
            raise AccelError(
                f"cp: an attention_mask of shape {tuple(mask.shape)}; {self._ranks} ranks share sequences of"
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
                self._ranks,
            )
        return found

    def _is_part(self, tokens: Tensor, length: int) -> bool:
        dim = self.config.buffers.get("input_ids", 1)
        return tokens.dim() > 1 and tokens.shape[dim] * self._ranks == length

    @property
    def _running_length(self) -> int:
        sequences = running()
        return 0 if sequences is None else sequences.length

    @property
    def _ranks(self) -> int:
        return self.run.mesh.size("cp") if self.run.mesh else 1
