"""BERT, whose norms come after the blocks; megatron-core's come before."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accel_megatron.adapters.adapter import Adapter
from accel_megatron.layers import Norm, ignore_padding
from accel_megatron.library import quiet
from accel_megatron.losses import cover_padding

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Bert"]


class Bert(Adapter):
    """BertForMaskedLM."""

    ends: ClassVar = {
        "output_layer": "cls.predictions.decoder",
        "output_layer.bias": "cls.predictions.bias",
        "embedding.word_embeddings": "bert.embeddings.word_embeddings",
        "embedding.position_embeddings": "bert.embeddings.position_embeddings",
        "embedding.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
        "embedding.embedding_dropout.0": "bert.embeddings.LayerNorm",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    }
    layer = "bert.encoder.layer"
    parts: ClassVar = {
        "attention_norm": "attention.output.LayerNorm",
        "output_norm": "output.LayerNorm",
        "self_attention.linear_qkv": "attention.self.query attention.self.key attention.self.value",
        "self_attention.linear_proj": "attention.output.dense",
        "mlp.linear_fc1": "intermediate.dense",
        "mlp.linear_fc2": "output.dense",
    }

    splits_sequences = False

    @staticmethod
    def unsupported(hf: Any) -> Mapping[str, bool]:
        return {
            f"hidden_act {hf.hidden_act!r}": hf.hidden_act != "gelu",
            "is_decoder": hf.is_decoder,
            "add_cross_attention": hf.add_cross_attention,
        }

    def settings(self) -> Mapping[str, Any]:
        hf = self.hf_config
        return {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "ffn_hidden_size": hf.intermediate_size,
            "activation_func": functional.gelu,
            "layernorm_epsilon": hf.layer_norm_eps,
            "hidden_dropout": hf.hidden_dropout_prob,
            "attention_dropout": hf.attention_probs_dropout_prob,
            "init_method_std": hf.initializer_range,
        }

    def chunk(self, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        from megatron.core.models.bert.bert_model import BertModel

        made: Any = BertModel(
            config,
            self.hf_config.type_vocab_size,
            _layer_spec(),
            vocab_size=self.padded(config.tensor_model_parallel_size),
            max_sequence_length=self.hf_config.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=self.hf_config.tie_word_embeddings,
            add_binary_head=False,
            vp_stage=vp_stage,
        )
        made.encoder.final_layernorm = None
        if pre_process:
            ignore_padding(made.embedding.word_embeddings, self.hf_config.pad_token_id)
            norm = Norm(config, config.hidden_size, config.layernorm_epsilon)
            made.embedding.embedding_dropout = nn.Sequential(norm, made.embedding.embedding_dropout)
        if post_process:
            cover_padding(made.output_layer, self.hf_config.vocab_size)
        model: nn.Module = made
        return model

    def call(self, chunk: nn.Module, inputs: Mapping[str, Any], *, last: bool, logits: bool) -> Any:
        self.cover(inputs, ("input_ids", "attention_mask", "token_type_ids", "labels"))
        ids, labels, mask = inputs["input_ids"], inputs.get("labels"), inputs.get("attention_mask")
        kinds = inputs.get("token_type_ids")
        mask = torch.ones_like(ids) if mask is None else mask
        found = chunk(ids, mask, torch.zeros_like(ids) if kinds is None else kinds)
        return self.output(found[0], labels, logits=logits) if last else found

    def make_output(self, loss: Tensor | None, logits: Tensor | None) -> Any:
        from transformers.modeling_outputs import MaskedLMOutput

        return MaskedLMOutput(loss=loss, logits=logits)


@cache
def _layer_spec() -> Any:
    with quiet():
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
        from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    class NormsBehind(TransformerLayer):  # type: ignore[misc]
        """Attention, then a norm; a feed-forward network, then a norm."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            self.attention_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)
            self.output_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

        def _forward_attention(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            found, context = super()._forward_attention(*args, **kwargs)
            return self.attention_norm(found), context

        def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
            return self.output_norm(super()._forward_mlp(*args, **kwargs))

    theirs = bert_layer_local_spec.submodules
    parts = TransformerLayerSubmodules(
        input_layernorm=IdentityOp,
        self_attention=theirs.self_attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=IdentityOp,
        mlp=theirs.mlp,
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=NormsBehind, submodules=parts)
