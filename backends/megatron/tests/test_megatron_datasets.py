"""megatron-core's indexed files, read and trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import MODELS, VOCABULARY, accelerator, write_indexed_text

from accel_core import AccelError, ConfigError, DataLoaderConfiguration


def trained(folder: str) -> tuple[list[int], list[int], list[float]]:
    from accel_megatron import indexed_datasets

    ours = accelerator(tp_degree=2, num_micro_batches=2)
    if ours.is_main_process:
        write_indexed_text(folder)
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


def test_samples_have_the_token_that_follows_each_and_train(tmp_path: Path, run_processes) -> None:
    one, other = run_processes(trained, str(tmp_path))
    tokens, following, losses = one
    assert one == other
    assert tokens[1:] == following[:-1]
    assert len(tokens) == 12
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(4.2, abs=0.2)


def loaded(folder: str, provided: bool) -> tuple[list[int], list[Any], list[Any], list[Any]]:
    """How many samples were asked for, and those of the loaders, with a pass cut off and resumed."""
    from accel_megatron import indexed_loaders

    asked: list[int] = []

    def provide(counts: Any) -> Any:
        asked.extend(counts)
        numbers = torch.arange(1000)
        return numbers[: counts[0]], numbers[: counts[1]], None

    options: dict[str, Any] = {"train_samples": 48} if provided else {"train_iters": 6}
    ours = accelerator(
        num_micro_batches=2,
        eval_iters=2,
        eval_interval=5,
        consumed_samples=[16],
        custom_megatron_datasets_provider_function=provide if provided else None,
        **options,
    )
    about: dict[str, Any] = {}
    if not provided:
        if ours.is_main_process:
            write_indexed_text(folder)
        ours.wait_for_everyone()
        about = {"data_path": f"{folder}/text", "seq_length": 12, "vocab_size": VOCABULARY}
        about |= {"eod": VOCABULARY - 1, "split": "60,40,0", "path_to_cache": f"{folder}/cache"}
    train, valid, test = indexed_loaders(ours, micro_batch_size=2, **about)
    assert test is None
    if not provided:
        return asked, [batch["input_ids"].shape for batch in train], [len(valid)], []
    passes = [[batch.tolist() for batch in valid] for _ in range(3)]
    stream = iter(train)
    first = next(stream).tolist()
    ours.save_state(f"{folder}/state")
    stream.close()
    ours.load_state(f"{folder}/state")
    return asked, [first], [batch.tolist() for batch in train], passes


def flat(*batches: Any) -> list[int]:
    return sorted(number for each in batches for batch in each for number in batch)


def test_loaders_have_as_many_samples_as_training_and_go_on_where_it_stood(
    tmp_path: Path, run_processes
) -> None:
    one, other = run_processes(loaded, str(tmp_path), True)
    assert one[0] == other[0] == [48, 32, 16]
    assert flat(one[1], other[1]) == list(range(16, 24))
    assert flat(one[2], other[2]) == list(range(24, 48))
    passes = [flat(*both) for both in zip(one[3], other[3], strict=True)]
    assert passes == [list(range(16)), list(range(16, 32)), list(range(16))]


def test_loaders_read_indexed_files(tmp_path: Path, run_processes) -> None:
    for _, shapes, (length,), _ in run_processes(loaded, str(tmp_path), False):
        assert shapes == [(4, 12)] * 4
        assert length == 2


def split() -> tuple[int, int, int]:
    from accel_megatron import indexed_loaders

    numbers = torch.arange(100)
    ours = accelerator(
        num_micro_batches=2,
        train_iters=6,
        eval_iters=3,
        custom_megatron_datasets_provider_function=lambda counts: (numbers, numbers, None),
        kwargs_handlers=[DataLoaderConfiguration(split_batches=True)],
    )
    train, valid, _ = indexed_loaders(ours, micro_batch_size=2)
    return len(train), len(valid), len(next(iter(train)))


def test_loaders_of_batches_that_are_split_have_as_many(run_processes) -> None:
    assert run_processes(split) == [(6, 3, 4)] * 2


def two_of_three() -> None:
    from accel_megatron import indexed_loaders

    ours = accelerator(train_iters=6, custom_megatron_datasets_provider_function=lambda counts: counts[:2])
    with pytest.raises(ConfigError, match=r"gave 2 dataset\(s\)\nreturn three"):
        indexed_loaders(ours, micro_batch_size=2)


def test_a_provider_of_other_than_three_datasets_is_refused(run_processes) -> None:
    run_processes(two_of_three, world=1)


def consumed_elsewhere() -> None:
    ours = accelerator(consumed_samples=[8])
    loader = torch.utils.data.DataLoader(list(range(8)))
    with pytest.raises(AccelError, match="skip_first_batches"):
        ours.prepare(MODELS["gpt2"](), loader)


def test_samples_of_a_dataloader_of_ones_own_are_not_left_out_unsaid(run_processes) -> None:
    run_processes(consumed_elsewhere, world=1)


def nothing_consumed() -> int:
    ours = accelerator(consumed_samples=[0, 0, 0])
    return len(ours.prepare(MODELS["gpt2"](), torch.utils.data.DataLoader(list(range(8))))[1])


def test_no_samples_are_nothing_to_leave_out(run_processes) -> None:
    assert run_processes(nothing_consumed, world=1) == [8]
