"""Micro-batches: how a batch is cut into them, and which shapes they may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from accel_core import AccelError

if TYPE_CHECKING:
    from accel_megatron.config import Sized

__all__ = ["check_lengths", "cut", "shape"]


def cut(inputs: Mapping[str, Any], count: int, *, exact: bool) -> list[dict[str, Any]]:
    """Return the batch in parts of one size; in evaluation as many as there can be."""
    sizes = {len(each) for each in inputs.values() if isinstance(each, Tensor) and each.dim()}
    if len(sizes) != 1:
        raise AccelError(
            f"megatron: the batch's tensors have {sorted(sizes)} rows, and micro-batches are cut by rows\n"
            "give tensors with one row a sample"
        )
    (size,) = sizes
    if size % count and exact:
        raise AccelError(
            f"megatron: a batch of {size} cannot be cut into num_micro_batches {count} of one size\n"
            f"use a batch size that {count} divides, and drop_last=True"
        )
    # In evaluation the ragged last batch is one micro-batch.
    count = count if size % count == 0 else 1
    rows = size // count
    return [
        {
            name: each[at * rows : (at + 1) * rows] if isinstance(each, Tensor) and each.dim() else each
            for name, each in inputs.items()
        }
        for at in range(count)
    ]


def shape(batches: Sequence[Any], stages: int, *, decoded: bool = False) -> tuple[int, int]:
    """(rows, sequence length) of the micro-batches that stages exchange.

    decoded: of the inputs of a decoder, beside the inputs of its encoder; 0 if there are none.
    """
    shapes = [_of_rows(batch, decoded) for batch in batches]
    if stages > 1 and len(set(shapes)) > 1:
        raise AccelError(
            f"megatron: micro-batches of {shapes[0]} and {next(s for s in shapes if s != shapes[0])} (rows,"
            " length) in one window, and stages send each other one shape\n"
            "pad them to one shape, and drop the last batch (drop_last=True)"
        )
    return shapes[0]


def _of_rows(batch: Any, decoded: bool) -> tuple[int, int]:
    if isinstance(batch, Mapping):
        batch = [each for name, each in batch.items() if str(name).startswith("decoder_") == decoded]
    elif decoded:
        return 0, 0
    found = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1)
    rows, length = next((tuple(leaf.shape[:2]) for leaf in found), (0, 0) if decoded else (1, 1))
    return rows, length


def check_lengths(plugin: Sized, batches: Sequence[Any]) -> None:
    """Raise AccelError for a sequence longer than the options allow."""
    (_, sequence), (_, decoded) = shape(batches, 1), shape(batches, 1, decoded=True)
    lengths = {
        "seq_length": (sequence, plugin.seq_length),
        "encoder_seq_length": (sequence, plugin.encoder_seq_length),
        "decoder_seq_length": (decoded or sequence, plugin.decoder_seq_length),
    }
    for name, (length, longest) in lengths.items():
        if longest is not None and length > longest:
            raise AccelError(
                f"megatron: a sequence of {length} tokens, and {name} is {longest}\n"
                "cut sequences to that (truncation=True, max_length=...), or raise it"
            )
