"""Llama: RMS norms, rotary positions, gated layers.

Keys and values may be shared by heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch.nn import functional

from accel_megatron.adapters.adapter import Causal

__all__ = ["Llama"]


class Llama(Causal):
    """LlamaForCausalLM."""

    ends: ClassVar = {
        "output_layer": "lm_head",
        "embedding.word_embeddings": "model.embed_tokens",
        "decoder.final_layernorm": "model.norm",
    }
    layer = "model.layers"
    parts: ClassVar = {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.gate_proj mlp.up_proj",
        "mlp.linear_fc2": "mlp.down_proj",
    }

    rotary = True
    ignores_padding = True

    @staticmethod
    def unlike(theirs: Any) -> str | None:
        rope = theirs.rope_parameters or {}
        kind = rope.get("rope_type", "default")
        odd = {
            f"hidden_act {theirs.hidden_act!r}": theirs.hidden_act != "silu",
            f"attention_bias {theirs.attention_bias} and mlp_bias {theirs.mlp_bias}": theirs.attention_bias
            is not theirs.mlp_bias,
            f"rope_type {kind!r}": kind != "default",
        }
        return next((name for name, is_so in odd.items() if is_so), None)

    def settings(self) -> Mapping[str, Any]:
        theirs = self.theirs
        return {
            "num_layers": theirs.num_hidden_layers,
            "hidden_size": theirs.hidden_size,
            "num_attention_heads": theirs.num_attention_heads,
            "num_query_groups": theirs.num_key_value_heads,
            "kv_channels": theirs.head_dim,
            "ffn_hidden_size": theirs.intermediate_size,
            "activation_func": functional.silu,
            "gated_linear_unit": True,
            "add_bias_linear": theirs.mlp_bias,
            "normalization": "RMSNorm",
            "layernorm_epsilon": theirs.rms_norm_eps,
            "hidden_dropout": 0.0,
            "attention_dropout": theirs.attention_dropout,
            "init_method_std": theirs.initializer_range,
        }

    def rotation(self) -> Mapping[str, Any]:
        return {"rotary_base": self.theirs.rope_parameters["rope_theta"]}
