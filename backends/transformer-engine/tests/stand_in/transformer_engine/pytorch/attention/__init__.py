"""Attention of the one kind that megatron-core's causal layers ask for, by torch; the wheel's is CUDA's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        softmax_scale: float | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.heads, self.scale, self.dropout = num_attention_heads, softmax_scale, attention_dropout
        assert others["attention_type"] == "self"
        assert not self.dropout

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: str | None = None,
        **others: Any,
    ) -> Tensor:
        assert attention_mask is None
        assert attn_mask_type == "causal"
        assert not others
        # (sequence, batch, heads, channels) -> (batch, heads, sequence, channels)
        parts = [each.permute(1, 2, 0, 3) for each in (query_layer, key_layer, value_layer)]
        found = scaled_dot_product_attention(*parts, is_causal=True, scale=self.scale, enable_gqa=True)
        return found.permute(2, 0, 1, 3).flatten(2)
