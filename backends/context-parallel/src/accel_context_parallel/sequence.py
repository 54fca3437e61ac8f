"""A rank's part of a sequence: a piece of its head and the matching tail piece.

Under a causal mask later tokens attend to more: pairs of pieces give all ranks the same work. It is
the order of torch's own context parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from accel_core import AccelError

__all__ = ["Part", "Rows", "causal_mask", "documents_between", "length_of", "part", "places", "positions"]

# What is kept for later batches is made outside of `torch.inference_mode`: backward cannot use tensors of it.


@frozen
class Rows:
    """Rows of tokens that do not all see each other. Tensors are of whole sequences."""

    documents: Tensor | None = None
    """(B, S): number of each token's document; None if rows hold one document."""
    kept: Tensor | None = None
    """(B, S): False for padding; None without padding."""


@define(eq=False)
class Part:
    """The whole of which a tensor is a part."""

    length: int
    whole: Tensor | None = None
    """The whole tensor, if it may be positions or a mask: its numbers are no floats."""

    @cached_property
    def documents(self) -> Tensor | None:
        """Documents of rows whose positions these are; None if it is certain that rows hold one document.

        On an accelerator the host does not wait for the numbers: positions may always restart.
        """
        if self.whole is None or self.whole.dim() != 2:
            return None
        steps = self.whole.diff(dim=1, prepend=self.whole[:, :1] - 1)
        documents = (steps != 1).cumsum(1)
        return documents if documents.device.type != "cpu" or documents.any() else None

    @cached_property
    def kept(self) -> Tensor | None:
        """Tokens that are not padding, of a mask; None if it is certain that there is no padding."""
        if self.whole is None:
            return None
        kept = self.whole.bool()
        return kept if kept.device.type != "cpu" or not kept.all() else None


def documents_between(boundaries: Tensor, length: int) -> Tensor:
    """(documents + 1,) -> (1, length): the documents of one row, from their starts and the row's end."""
    where = torch.arange(length, device=boundaries.device)
    return torch.bucketize(where, boundaries[1:-1].to(where.dtype), right=True)[None]


def length_of(batch: Mapping[str, Any], dims: Mapping[str, int], ranks: int) -> int:
    """Return the length of the batch's sequences.

    Raises:
        AccelError: the lengths differ, or ranks cannot share them evenly.
    """
    for name, dim in dims.items():
        if not -batch[name].dim() <= dim < batch[name].dim():
            raise AccelError(
                f"cp: {name} has the shape {tuple(batch[name].shape)}, and cp.buffers says that its sequence"
                f" is dimension {dim}\nleave {name} out of cp.buffers, or correct the dimension"
            )
    lengths = {name: batch[name].shape[dim] for name, dim in dims.items()}
    length = int(next(iter(lengths.values())))
    if set(lengths.values()) != {length} or length % (2 * ranks):
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise AccelError(
            f"cp: {ranks} ranks cannot share sequences of these lengths evenly: {found}\n"
            f"pad all of them to one multiple of {2 * ranks} in the collate function, or correct the"
            " dimensions in cp.buffers"
        )
    return length


def part(tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """(..., S, ...) -> (..., S / ranks, ...).

    Pieces `rank` and `2 * ranks - 1 - rank` of 2 * ranks.
    """
    piece = tensor.shape[dim] // (2 * ranks)
    starts = (rank * piece, (2 * ranks - 1 - rank) * piece)
    return torch.cat([tensor.narrow(dim, start, piece) for start in starts], dim)


@lru_cache(maxsize=16)
@torch.inference_mode(mode=False)
def positions(length: int, ranks: int, device: torch.device) -> Tensor:
    """(ranks, length / ranks): the positions in the whole sequence of each rank's tokens."""
    whole = torch.arange(length, device=device)
    return torch.stack([part(whole, 0, rank, ranks) for rank in range(ranks)])


def places(where: Tensor, tokens: Tensor, dim: int) -> Tensor:
    """(S / ranks,) -> (B, S / ranks), or (S / ranks, B) if the sequence is dimension 0 of `tokens`."""
    is_first = dim % tokens.dim() == 0
    rows = where.expand(*(tokens.shape[1:2] if is_first else tokens.shape[:1]), -1)
    return rows.movedim(-1, 0) if is_first else rows


@lru_cache(maxsize=1)
@torch.inference_mode(mode=False)
def causal_mask(length: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """(length / ranks, length): True if a token of this rank sees a token of the whole sequence.

    The parts of the whole sequence lie rank by rank. One mask is kept, for all layers and batches.
    """
    where = positions(length, ranks, device)
    return where[rank][:, None] >= where.flatten()
