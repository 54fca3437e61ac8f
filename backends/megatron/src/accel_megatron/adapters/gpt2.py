"""GPT-2: transformers' weights are (in, out), with query, key and value in one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch.nn import functional

from accel_megatron.adapters.adapter import Causal

__all__ = ["Gpt2"]

_TANH = ("gelu_new", "gelu_pytorch_tanh")


class Gpt2(Causal):
    """GPT2LMHeadModel."""

    ends: ClassVar = {
        "output_layer": "lm_head",
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.final_layernorm": "transformer.ln_f",
    }
    layer = "transformer.h"
    parts: ClassVar = {
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    transposed = True

    @staticmethod
    def unsupported(hf: Any) -> Mapping[str, bool]:
        return {
            f"activation_function {hf.activation_function!r}": hf.activation_function not in (*_TANH, "gelu"),
            f"embd_pdrop {hf.embd_pdrop} unlike resid_pdrop {hf.resid_pdrop}": hf.embd_pdrop
            != hf.resid_pdrop,
            "scale_attn_weights False": not hf.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx": hf.scale_attn_by_inverse_layer_idx,
            "add_cross_attention": hf.add_cross_attention,
        }

    def settings(self) -> Mapping[str, Any]:
        hf = self.hf_config
        tanh = hf.activation_function in _TANH
        return {
            "num_layers": hf.n_layer,
            "hidden_size": hf.n_embd,
            "num_attention_heads": hf.n_head,
            "ffn_hidden_size": hf.n_inner or 4 * hf.n_embd,
            "activation_func": partial(functional.gelu, approximate="tanh") if tanh else functional.gelu,
            "layernorm_epsilon": hf.layer_norm_epsilon,
            "hidden_dropout": hf.resid_pdrop,
            "attention_dropout": hf.attn_pdrop,
            "init_method_std": hf.initializer_range,
        }
