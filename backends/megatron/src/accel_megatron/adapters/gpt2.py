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
    def unlike(theirs: Any) -> str | None:
        odd = {
            f"activation_function {theirs.activation_function!r}": theirs.activation_function
            not in (*_TANH, "gelu"),
            f"embd_pdrop {theirs.embd_pdrop} unlike resid_pdrop {theirs.resid_pdrop}": theirs.embd_pdrop
            != theirs.resid_pdrop,
            "scale_attn_weights False": not theirs.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx": theirs.scale_attn_by_inverse_layer_idx,
            "add_cross_attention": theirs.add_cross_attention,
        }
        return next((name for name, is_so in odd.items() if is_so), None)

    def settings(self) -> Mapping[str, Any]:
        theirs = self.theirs
        tanh = theirs.activation_function in _TANH
        return {
            "num_layers": theirs.n_layer,
            "hidden_size": theirs.n_embd,
            "num_attention_heads": theirs.n_head,
            "ffn_hidden_size": theirs.n_inner or 4 * theirs.n_embd,
            "activation_func": partial(functional.gelu, approximate="tanh") if tanh else functional.gelu,
            "layernorm_epsilon": theirs.layer_norm_epsilon,
            "hidden_dropout": theirs.resid_pdrop,
            "attention_dropout": theirs.attn_pdrop,
            "init_method_std": theirs.initializer_range,
        }
