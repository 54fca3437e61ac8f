"""Layer specs.

Layers of transformer-engine if it is installed, else of megatron-core with a norm of this package.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import Tensor, nn

from accel_megatron.library import part, quiet

__all__ = ["Norm", "block_spec", "has_transformer_engine", "ignore_padding"]


class Norm:
    """Torch's LayerNorm or RMSNorm, with weights marked for split sequences.

    megatron-core's own wrapper refuses `sequence_parallel`, though all it takes is this mark, by which
    `finalize_model_grads` sums gradients over the ranks that split a layer.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        made = kind(hidden_size, eps=eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made


def ignore_padding(embeddings: nn.Module, token: int | None) -> None:
    """Give the row of the padding token no gradient, as torch's `padding_idx` does."""
    if token is None:
        return

    def detach(module: Any, inputs: tuple[Tensor, ...], found: Tensor) -> Tensor:
        padding = (inputs[0] == token).unsqueeze(-1)  # (batch, sequence, 1)
        if found.shape[:2] != padding.shape[:2]:  # (part of the sequence, batch, hidden)
            rank, ranks = part(module.tp_group)
            padding = padding.transpose(0, 1).chunk(ranks)[rank]
        return found.detach().where(padding, found)

    embeddings.register_forward_hook(detach)


def has_transformer_engine() -> bool:
    """Return True if megatron-core has found transformer-engine for torch."""
    with quiet():
        from megatron.core.models.gpt import gpt_layer_specs
    return bool(gpt_layer_specs.HAVE_TE)


def block_spec(config: Any, vp_stage: int | None, layer: Any = None) -> Any:
    """Return the layers of one chunk, as `config` describes them.

    `layer`: another spec of one, with our norm.
    """
    with quiet():
        from megatron.core.models.gpt import gpt_layer_specs as specs
        from megatron.core.transformer.transformer_block import (
            TransformerBlockSubmodules,
            get_num_layers_to_build,
        )
    if layer is None and has_transformer_engine():
        return specs.get_gpt_layer_with_transformer_engine_spec(num_experts=config.num_moe_experts)
    if layer is None:
        layer = specs.get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, normalization=config.normalization
        )
        layer.submodules = copy(layer.submodules)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    count = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)
