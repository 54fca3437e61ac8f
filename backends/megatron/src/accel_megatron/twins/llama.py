"""Llama: RMS norms, rotary positions, gated layers; keys and values may be shared by heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import functional

from accel_megatron.pieces import Part, Piece, gated, heads, row, same
from accel_megatron.twins.twin import Causal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Llama"]


class Llama(Causal):
    """LlamaForCausalLM."""

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

    def pieces(self, name: str, tensor: Tensor, part: Part) -> Sequence[Piece]:
        module, _, kind = name.rpartition(".")
        if module == "output_layer":
            return [self.words("lm_head.weight", tensor, part)]
        if module == "embedding.word_embeddings":
            return [self.words("model.embed_tokens.weight", tensor, part)]
        if module == "decoder.final_layernorm":
            return [same(f"model.norm.{kind}", tensor)]
        number, _, inside = name.removeprefix("decoder.layers.").partition(".")
        return self._of_layer(number, inside, tensor, part)

    def _of_layer(self, number: str, name: str, tensor: Tensor, part: Part) -> Sequence[Piece]:
        module, _, kind = name.rpartition(".")
        ours = f"model.layers.{number}"
        before = {
            "self_attention.linear_qkv": "input_layernorm",
            "mlp.linear_fc1": "post_attention_layernorm",
        }
        norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
        if module in norms:
            return [same(f"{ours}.{norms[module]}.{kind}", tensor)]
        if kind.startswith("layer_norm_"):  # transformer-engine's layers have the norm before them inside
            return [same(f"{ours}.{before[module]}.{kind.removeprefix('layer_norm_')}", tensor)]
        if module == "self_attention.linear_qkv":
            names = [f"{ours}.self_attn.{which}_proj.{kind}" for which in "qkv"]
            return heads(names, tensor, part, groups=self.groups, queries=self.queries)
        if module == "mlp.linear_fc1":
            return gated([f"{ours}.mlp.gate_proj.{kind}", f"{ours}.mlp.up_proj.{kind}"], tensor, part)
        mine = "self_attn.o_proj" if module == "self_attention.linear_proj" else "mlp.down_proj"
        whole = f"{ours}.{mine}.{kind}"
        return [row(whole, tensor, part) if kind == "weight" else same(whole, tensor)]
