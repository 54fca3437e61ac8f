"""GPT-2: transformers' weights are (in, out), with query, key and value in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import evolve
from torch.nn import functional

from accel_megatron.pieces import Part, Piece, column, heads, row, same
from accel_megatron.twins.twin import Causal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Gpt2"]

_TANH = ("gelu_new", "gelu_pytorch_tanh")


class Gpt2(Causal):
    """GPT2LMHeadModel."""

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

    def pieces(self, name: str, tensor: Tensor, part: Part) -> Sequence[Piece]:
        module, _, kind = name.rpartition(".")
        if module == "output_layer":
            return [self.words("lm_head.weight", tensor, part)]
        if module == "embedding.word_embeddings":
            return [self.words("transformer.wte.weight", tensor, part)]
        if module == "embedding.position_embeddings":
            return [same("transformer.wpe.weight", tensor)]
        if module == "decoder.final_layernorm":
            return [same(f"transformer.ln_f.{kind}", tensor)]
        number, _, inside = name.removeprefix("decoder.layers.").partition(".")
        return self._of_layer(number, inside, tensor, part)

    def _of_layer(self, number: str, name: str, tensor: Tensor, part: Part) -> Sequence[Piece]:
        module, _, kind = name.rpartition(".")
        ours = f"transformer.h.{number}"
        norms = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}
        fused = {"self_attention.linear_qkv": "ln_1", "mlp.linear_fc1": "ln_2"}
        if module in norms:
            return [same(f"{ours}.{norms[module]}.{kind}", tensor)]
        if kind.startswith("layer_norm_"):  # transformer-engine's layers have the norm before them inside
            return [same(f"{ours}.{fused[module]}.{kind.removeprefix('layer_norm_')}", tensor)]
        if module == "self_attention.linear_qkv":
            names = [f"{ours}.attn.c_attn.{kind}"]
            found = heads(names, tensor, part, groups=self.groups, queries=self.queries)
        elif module == "mlp.linear_fc1":
            found = [column(f"{ours}.mlp.c_fc.{kind}", tensor, part)]
        else:
            mine = "attn.c_proj" if module == "self_attention.linear_proj" else "mlp.c_proj"
            whole = f"{ours}.{mine}.{kind}"
            found = [row(whole, tensor, part) if kind == "weight" else same(whole, tensor)]
        return [evolve(piece, transposed=kind == "weight") for piece in found]
