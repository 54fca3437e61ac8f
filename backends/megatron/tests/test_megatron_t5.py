"""An encoder and a decoder of megatron-core's, as a model of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_jobs import VOCABULARY, accelerator, batches

from accel_core import AccelError

ENCODED, DECODED = 12, 5


def trained(options: dict[str, Any]) -> list[float]:
    from accel_megatron import build_model, transformer_config

    ours = accelerator(
        encoder_seq_length=ENCODED,
        decoder_seq_length=DECODED,
        custom_loss_function=lambda losses, inputs: losses.mean(),
        **options,
    )
    shape: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    config = transformer_config(ours, hidden_dropout=0.0, attention_dropout=0.0, **shape)

    def provide(pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
        from megatron.core.models.T5.t5_model import T5Model
        from megatron.core.models.T5.t5_spec import (
            get_t5_decoder_with_local_block_spec,
            get_t5_encoder_with_local_block_spec,
        )

        specs = get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(2)
        return T5Model(config, config, *specs, VOCABULARY, ENCODED, share_embeddings_and_output_weights=True)

    torch.manual_seed(1)
    model = build_model(ours, provide)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ours.prepare(model, optimizer)
    losses = []
    ids = batches(1)[0]["input_ids"]
    for _ in range(3):
        later = torch.ones(DECODED, DECODED, dtype=torch.bool).triu(1)
        inputs = {
            "encoder_input_ids": ids,
            "encoder_attn_mask": torch.zeros(len(ids), 1, ENCODED, ENCODED, dtype=torch.bool),
            "decoder_input_ids": ids[:, :DECODED],
            "decoder_attn_mask": later.expand(len(ids), 1, -1, -1),
            "encoder_decoder_attn_mask": torch.zeros(len(ids), 1, DECODED, ENCODED, dtype=torch.bool),
            "lm_labels": ids[:, 1 : DECODED + 1].contiguous(),
        }
        loss = model(**inputs).loss
        ours.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with pytest.raises(AccelError, match="6 tokens, and decoder_seq_length is 5"):
        model(**inputs | {"decoder_input_ids": ids[:, : DECODED + 1]})
    return losses


def test_it_trains(run_processes) -> None:
    for losses in run_processes(trained, {"tp_degree": 2, "num_micro_batches": 2}):
        assert losses == sorted(losses, reverse=True)
