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
    def unsupported(hf: Any) -> Mapping[str, bool]:
        rope = hf.rope_parameters or {}
        kind = rope.get("rope_type", "default")
        return {
            f"hidden_act {hf.hidden_act!r}": hf.hidden_act != "silu",
            f"attention_bias {hf.attention_bias} and mlp_bias {hf.mlp_bias}": hf.attention_bias
            is not hf.mlp_bias,
            f"rope_type {kind!r}": kind != "default",
        }

    def settings(self) -> Mapping[str, Any]:
        hf = self.hf_config
        return {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": hf.head_dim,
            "ffn_hidden_size": hf.intermediate_size,
            "activation_func": functional.silu,
            "gated_linear_unit": True,
            "add_bias_linear": hf.mlp_bias,
            "normalization": "RMSNorm",
            "layernorm_epsilon": hf.rms_norm_eps,
            "hidden_dropout": 0.0,
            "attention_dropout": hf.attention_dropout,
            "init_method_std": hf.initializer_range,
        }

    def rotation(self) -> Mapping[str, Any]:
        return {"rotary_base": self.hf_config.rope_parameters["rope_theta"]}
