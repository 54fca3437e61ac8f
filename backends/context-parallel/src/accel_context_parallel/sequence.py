"""A rank's part of a sequence: a piece of its head and the matching tail piece.

Under a causal mask later tokens attend to more: pairs of pieces give all ranks the same work. It is
the order of torch's own context parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from accel_core import AccelError

__all__ = ["causal_mask", "length_of", "part", "places", "positions"]

# What is kept for later batches is made outside of `torch.inference_mode`: backward cannot use tensors of it.


def length_of(batch: Mapping[str, Any], dims: Mapping[str, int], ranks: int) -> int:
    """Return the length of the batch's sequences.

    Raises:
        AccelError: they differ, cannot be shared evenly, or a mask goes with them.
    """
    lengths = {name: batch[name].shape[dim] for name, dim in dims.items()}
    length = int(next(iter(lengths.values())))
    if set(lengths.values()) != {length} or length % (2 * ranks):
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise AccelError(
            f"cp: {ranks} ranks cannot share sequences of these lengths evenly: {found}\n"
            f"pad all of them to one multiple of {2 * ranks} in the collate function, or correct the"
            " dimensions in cp.buffers"
        )
    if batch.get("attention_mask") is not None:
        raise AccelError(
            "cp: the batch has an attention_mask, of which each rank would have a part only\n"
            "leave it out in the collate function; with padding on the right, causal attention needs none"
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
    """(ranks, length / ranks).

    Where in the whole sequence the tokens of each rank stand.
    """
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
    """(length / ranks, length).

    True where a token of this rank sees one of the whole sequence, whose parts lie rank by rank. One is kept,
    for all layers and batches of a length.
    """
    where = positions(length, ranks, device)
    return where[rank][:, None] >= where.flatten()
