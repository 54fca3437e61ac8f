"""A megatron-core model of the user's own: experts, chunks and checkpoints between layouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import LENGTH, VOCABULARY, accelerator, batches


def chunk(config: Any, pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt import GPTModel

    from accel_megatron.layers import block_spec

    return GPTModel(
        config,
        block_spec(config, vp_stage),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        vp_stage=vp_stage,
    )


def train(options: dict[str, Any], experts: int | None, folder: str, last: int) -> Any:
    """Steps from the checkpoint `0`, if there is one, to `last`; losses and names."""
    from accel_megatron import MegatronLMDummyScheduler, build_model, transformer_config

    ours = accelerator(num_micro_batches=2, lr_decay_iters=10, **options)
    shape: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    if experts:
        shape |= {"add_bias_linear": False}  # which megatron-core adds in place, to a view
        shape |= {"num_moe_experts": experts, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
    config = transformer_config(ours, hidden_dropout=0.0, attention_dropout=0.0, **shape)
    torch.manual_seed(1)
    model = build_model(ours, partial(chunk, config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, scheduler = ours.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer))
    if Path(folder, "0").exists():
        ours.load_state(f"{folder}/0")
    else:
        ours.save_state(f"{folder}/0")
    topology, losses = ours.run.topology, []
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for batch in batches(last, rows=8):
        ids = batch["input_ids"][topology.reader :: topology.readers]
        inputs = {
            "input_ids": ids,
            "labels": ids,
            "position_ids": torch.arange(LENGTH).expand_as(ids),
            "attention_mask": later.expand(len(ids), 1, -1, -1),
        }
        loss = model(**inputs).loss
        ours.backward(loss)
        norm = ours.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append((float(ours.reduce(loss.detach(), reduction="mean")), float(norm)))
    names = {name: tuple(each.shape) for name, each in ours.get_state_dict(model, rank0_only=False).items()}
    rates = scheduler.get_last_lr()
    ours.end_training()
    return losses, names, rates


@pytest.mark.parametrize(
    ("experts", "options", "world"),
    [
        (None, {"tp_degree": 2, "sequence_parallelism": True}, 2),
        (None, {"pp_degree": 2, "use_distributed_optimizer": True}, 2),
        (4, {"expert_model_parallel_size": 2}, 2),
        pytest.param(4, {"expert_model_parallel_size": 2, "pp_degree": 2}, 4, marks=pytest.mark.full),
    ],
)
@pytest.mark.by_default
def test_it_trains_the_same_in_any_layout(
    tmp_path: Path, experts: int | None, options: dict[str, Any], world: int, run_processes
) -> None:
    ((losses, names, rates),) = run_processes(train, {}, experts, str(tmp_path), 3, world=1)
    assert rates == pytest.approx([1e-2 * 0.7])
    for found, theirs, _ in run_processes(train, options, experts, str(tmp_path), 3, world=world):
        assert theirs == names
        for ours, wanted in zip(found, losses, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-4)
