"""megatron-core's indexed files, read and trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_jobs import MODELS, VOCABULARY, accelerator, quiet

from accel_core.testing import run_processes


def write(folder: str) -> None:
    with quiet():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(f"{folder}/text.bin")
        for document in range(40):
            builder.add_document(torch.arange(30) % (VOCABULARY - 2) + document % 2, [30])
        builder.finalize(f"{folder}/text.idx")


def trained(folder: str) -> tuple[list[int], list[int], list[float]]:
    from accel_megatron import indexed_datasets

    ours = accelerator(tp_degree=2, num_micro_batches=2)
    if ours.is_main_process:
        write(folder)
    ours.wait_for_everyone()
    train, valid, test = indexed_datasets(
        f"{folder}/text",
        samples=(24, 4, 0),
        seq_length=12,
        vocab_size=VOCABULARY,
        eod=VOCABULARY - 1,
        split="90,10,0",
        path_to_cache=f"{folder}/cache",
    )
    assert train is not None
    assert valid is not None
    assert test is None
    model = MODELS["gpt2"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(train, batch_size=8, drop_last=True)
    model, optimizer, loader = ours.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        ours.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    first = train[0]
    return first["input_ids"].tolist(), first["shift_labels"].tolist(), losses


def test_samples_have_the_token_that_follows_each_and_train(tmp_path: Path) -> None:
    one, other = run_processes(trained, str(tmp_path))
    tokens, following, losses = one
    assert one == other
    assert tokens[1:] == following[:-1]
    assert len(tokens) == 12
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(4.2, abs=0.2)
