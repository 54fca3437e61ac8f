"""A megatron-core model that the user built.

Weights have the names of megatron-core's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from accel_megatron import library
from accel_megatron.shard_map import Piece

__all__ = ["ModelOutput", "NativeModel"]

_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": True}
"""Arguments of sharded_state_dict: layers and experts by global numbers."""


@frozen
class ModelOutput:
    """The result of `model(**batch)`."""

    loss: Tensor | None
    logits: Tensor | None


class NativeModel:
    """Stands in for an adapter: inputs and outputs stay as the model has them."""

    def compute_loss(self, output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Losses of tokens are averaged by `loss_mask` if the batch has labels."""
        if inputs.get("labels") is None:
            return None, output
        mask = inputs.get("loss_mask")
        weights = torch.ones_like(output) if mask is None else mask.to(output.dtype)
        return (output * weights).sum() / weights.sum(), None

    def make_output(self, loss: Tensor | None, logits: Tensor | None) -> ModelOutput:
        """Both, by name."""
        return ModelOutput(loss, logits)

    def call(self, chunk: nn.Module, inputs: Mapping[str, Any], *, last: bool, logits: bool) -> Any:
        """Run the chunk's own forward."""
        return chunk(**inputs)


def _pieces(chunk: Any) -> Iterator[tuple[nn.Parameter, Piece]]:
    """Pieces of the whole model per parameter, by the chunk's sharded_state_dict."""
    with library.quiet():
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        found = list(nested_values(chunk.sharded_state_dict(metadata=dict(_METADATA))))
    made = [
        part
        for each in found
        if isinstance(each, ShardedTensorFactory)
        for part in nested_values(each.build())
    ]
    homes = {parameter.untyped_storage().data_ptr(): parameter for parameter in chunk.parameters()}
    for each in (*found, *made):
        if isinstance(each, ShardedTensor) and each.data is not None:
            parameter = homes.get(each.data.untyped_storage().data_ptr())
            if parameter is not None:
                yield parameter, _piece(each, parameter)


def _piece(part: Any, parameter: nn.Parameter) -> Piece:
    before = part.data.storage_offset() - parameter.storage_offset()
    return Piece(
        name=part.key,
        shape=tuple(part.global_shape),
        offset=tuple(part.global_offset),
        first=before // max(1, parameter[0].numel()),
        rows=part.data.shape[0],
    )


def _all(run: Any, pieces: Mapping[nn.Parameter, Sequence[Piece]]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Name -> (shape, dtype) of the weights of all ranks."""
    mine = {
        piece.name: (piece.global_shape, parameter.dtype)
        for parameter, found in pieces.items()
        for piece in found
    }
    merged: dict[str, tuple[tuple[int, ...], Any]] = {}
    for theirs in run.collectives("control").all_gather_object(mine):
        merged |= {name: value for name, value in theirs.items() if name not in merged}
    return merged


def _placeholder(weights: Mapping[str, tuple[tuple[int, ...], Any]]) -> Any:
    root = nn.Module()
    for name, (shape, dtype) in weights.items():
        home, (*path, last) = root, name.split(".")
        for step in path:
            if step not in home._modules:
                home.add_module(step, nn.Module())
            home = home.get_submodule(step)
        home.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
    return root
