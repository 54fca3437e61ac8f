"""The interface between the engine and a kind of transformers' models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from attrs import evolve
from torch import Tensor, nn

from accel_core import AccelError
from accel_megatron import losses
from accel_megatron.layers import block_spec, has_transformer_engine, ignore_padding
from accel_megatron.shard_map import Part, Piece, gated, heads, row, same, vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LABELS", "Adapter", "Causal"]


LABELS: Final = ("labels", "shift_labels")
"""Inputs of a loss; the second name is for labels of the following tokens."""


_BEFORE: Final = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}


class Adapter(ABC):
    """A kind of transformers' models in megatron-core's form.

    `hf_config` is the config of the model in transformers.
    """

    ends: ClassVar[Mapping[str, str]]
    """Module before or behind the layers, or parameter of it, there -> here."""
    layer: ClassVar[str]
    """Name of the layers, without their number."""
    parts: ClassVar[Mapping[str, str]]
    """Module of a layer in megatron-core -> in the user's model; several names for a fused module."""
    transposed: ClassVar[bool] = False
    """True if weights of linear layers are (in, out)."""
    splits_sequences = True
    """True if its norms know that a sequence may be split."""

    def __init__(self, hf_config: Any) -> None:
        self.hf_config = hf_config

    @staticmethod
    @abstractmethod
    def unsupported(hf: Any) -> Mapping[str, bool]:
        """Map settings that megatron-core cannot follow to True if the model has them."""

    @classmethod
    def unsupported_setting(cls, hf: Any) -> str | None:
        """Return the first setting that megatron-core cannot follow, or None."""
        return next((setting for setting, is_so in cls.unsupported(hf).items() if is_so), None)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.hf_config.num_hidden_layers)

    @property
    def groups(self) -> int:
        """Heads with a key and value of their own."""
        return int(getattr(self.hf_config, "num_key_value_heads", None) or self.hf_config.num_attention_heads)

    @property
    def queries(self) -> int:
        """Heads that share a key and value."""
        return int(self.hf_config.num_attention_heads) // self.groups

    def padded(self, ranks: int) -> int:
        """Return the size of the vocabulary, as that many ranks can split it."""
        return -(-int(self.hf_config.vocab_size) // ranks) * ranks

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """Arguments of TransformerConfig that define the computation."""

    @abstractmethod
    def chunk(self, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        """Return a part of the megatron-core model."""

    def pieces(self, name: str, tensor: Tensor, part: Part) -> Sequence[Piece]:
        """Pieces of the user's model that a chunk's parameter is made of.

        Layers in `name` are numbered globally.
        """
        module, _, kind = name.rpartition(".")
        if name in self.ends or module in self.ends:
            whole = self.ends.get(name) or f"{self.ends[module]}.{kind}"
            split = module in ("output_layer", "embedding.word_embeddings")
            return [self.words(whole, tensor, part) if split else same(whole, tensor)]
        number, _, module = module.partition(".layers.")[2].partition(".")
        # Layers of transformer-engine contain the norm that stands before them.
        if kind.startswith("layer_norm_"):
            module, kind = _BEFORE[module], kind.removeprefix("layer_norm_")
        found = self._of_layer(module, kind, f"{self.layer}.{number}", tensor, part)
        turned = self.transposed and kind == "weight" and "linear" in module
        return [evolve(piece, transposed=turned) for piece in found]

    def _of_layer(self, module: str, kind: str, layer: str, tensor: Tensor, part: Part) -> Sequence[Piece]:
        names = [f"{layer}.{each}.{kind}" for each in self.parts[module].split()]
        if module == "self_attention.linear_qkv":
            return heads(names, tensor, part, groups=self.groups, queries=self.queries)
        if module == "mlp.linear_fc1":
            return gated(names, tensor, part)
        return [
            row(names[0], tensor, part) if "linear" in module and kind == "weight" else same(names[0], tensor)
        ]

    @abstractmethod
    def call(self, chunk: nn.Module, inputs: Mapping[str, Any], *, last: bool, logits: bool) -> Any:
        """Return the model's own output if the chunk is the `last`.

        Otherwise return the activation for the next chunk.
        """

    def words(self, name: str, tensor: Tensor, part: Part) -> Piece:
        """Return the rows of the vocabulary."""
        return vocabulary(name, tensor, part, self.hf_config.vocab_size)

    def output(self, found: Tensor, labels: Tensor | None, *, logits: bool) -> Any:
        """Return the output transformers gives, from logits split along the vocabulary."""
        loss = None if labels is None else losses.mean_loss(found, labels)
        asked = logits or labels is None
        return self.make_output(loss, losses.whole(found, self.hf_config.vocab_size) if asked else None)

    def compute_loss(self, output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Return (loss, logits) of the model's output for a micro-batch."""
        return output.loss, output.logits

    def make_output(self, loss: Tensor | None, logits: Tensor | None) -> Any:
        """Return the result of `model(**batch)` for a whole batch."""
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(loss=loss, logits=logits)

    def cover(self, inputs: Mapping[str, Any], known: Sequence[str]) -> None:
        """Raise AccelError for inputs that would be ignored."""
        odd = [name for name, value in inputs.items() if name not in known and value is not None]
        if odd:
            raise AccelError(
                f"megatron: {self.hf_config.model_type} takes {', '.join(known)} here, not {odd[0]!r}\n"
                "leave it out of the batch"
            )


class Causal(Adapter):
    """Language models that predict the next token."""

    rotary = False
    """True if positions are rotations, and not learned."""
    ignores_padding = False
    """True if the padding token's embedding is not trained."""

    def chunk(self, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        """Return a GPTModel."""
        from megatron.core.models.gpt import GPTModel

        made: Any = GPTModel(
            config,
            block_spec(config, vp_stage),
            vocab_size=self.padded(config.tensor_model_parallel_size),
            max_sequence_length=self.hf_config.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=self.hf_config.tie_word_embeddings,
            position_embedding_type="rope" if self.rotary else "learned_absolute",
            vp_stage=vp_stage,
            **self.rotation(),
        )
        if pre_process and self.ignores_padding:
            ignore_padding(made.embedding.word_embeddings, self.hf_config.pad_token_id)
        if post_process:
            losses.cover_padding(made.output_layer, self.hf_config.vocab_size)
        model: nn.Module = made
        return model

    def targets(self, labels: Tensor) -> Tensor:
        """Return the label that the logits of each token are for."""
        return losses.next_tokens(labels)

    def rotation(self) -> Mapping[str, Any]:
        """Arguments of GPTModel for rotary positions."""
        return {}

    def call(self, chunk: nn.Module, inputs: Mapping[str, Any], *, last: bool, logits: bool) -> Any:
        self.cover(inputs, ("input_ids", "attention_mask", "position_ids", *LABELS))
        ids, labels = inputs["input_ids"], inputs.get("shift_labels")
        if labels is None and inputs.get("labels") is not None:
            labels = self.targets(inputs["labels"])
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        found = chunk(ids, positions, _hidden(inputs.get("attention_mask")))
        return self.output(found, labels, logits=logits) if last else found


def _hidden(mask: Tensor | None) -> Tensor | None:
    """(batch, sequence) of 1 and 0 -> (batch, 1, query, key), true if hidden."""
    if mask is None or mask.dim() != 2:
        return mask
    if has_transformer_engine():
        if not bool((mask[:, 1:] <= mask[:, :-1]).all()):
            raise AccelError(
                "megatron: transformer-engine's causal attention takes padding at the end of sequences only\n"
                "pad on the right: tokenizer.padding_side = 'right'"
            )
        return None  # nothing looks ahead at it
    length = mask.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    return later | (mask == 0)[:, None, None, :]
