"""Functions and lengths of the user's own, what is saved of randomness and scale, and the names of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import MODELS, accelerator, batches, optimizer_of

from accel_core import AccelError


def with_functions() -> tuple[float, float, float, float, int]:
    prepared: list[Any] = []

    def prepare(chunk: Any) -> Any:
        prepared.append(chunk)
        return chunk

    def read(micro_batches: Any) -> dict[str, Any]:
        ids = next(micro_batches)["text"]
        return {"input_ids": ids, "labels": ids}

    def tripled(output: Any, inputs: Any) -> Any:
        assert inputs["labels"] is not None
        return output.loss * 3

    ours = accelerator(
        pp_degree=2,
        custom_prepare_model_function=prepare,
        custom_get_batch_function=read,
        custom_loss_function=tripled,
    )
    model, ids = MODELS["gpt2"](), batches(1)[0]["input_ids"]
    wanted = model(input_ids=ids, labels=ids).loss
    wanted.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    model.zero_grad()
    model, optimizer = ours.prepare(model, optimizer_of(model))
    loss = model(text=ids).loss
    ours.backward(loss)
    found = float(ours.clip_grad_norm_(model.parameters(), 1e9))
    optimizer.step()
    return float(loss.detach()), 3 * float(wanted.detach()), found, 3 * norm, len(prepared)


def test_functions_of_ones_own_prepare_read_and_judge(run_processes) -> None:
    for loss, wanted, norm, wanted_norm, prepared in run_processes(with_functions):
        assert (loss, norm) == (pytest.approx(wanted, rel=1e-5), pytest.approx(wanted_norm, rel=1e-4))
        assert prepared == 1


def with_logits() -> float:
    ours = accelerator(pp_degree=2, return_logits=True)
    model, batch = MODELS["llama"](), batches(1)[0]
    wanted = model(**batch).logits.detach()
    model, _ = ours.prepare(model, optimizer_of(model))
    return float((model(**batch).logits - wanted).abs().max())


def test_logits_are_returned_in_training_where_asked(run_processes) -> None:
    assert all(far < 1e-5 for far in run_processes(with_logits))


def too_long() -> None:
    ours = accelerator(seq_length=8)
    model = ours.prepare(MODELS["gpt2"]().eval())
    batch = batches(1)[0]
    with torch.no_grad():
        model(input_ids=batch["input_ids"][:, :8])
        with pytest.raises(AccelError, match="12 tokens, and seq_length is 8"):
            model(input_ids=batch["input_ids"])


def too_long_to_decode() -> None:
    ours = accelerator(encoder_seq_length=12, decoder_seq_length=4)
    model = ours.prepare(MODELS["gpt2"]().eval())
    ids = batches(1)[0]["input_ids"]

    def run(**batch: Any) -> None:
        ours.forward_backward(
            model, [batch], lambda m, b: (m(input_ids=b["input_ids"]).logits.mean(), None), forward_only=True
        )

    run(input_ids=ids, decoder_input_ids=ids[:, :4])
    with pytest.raises(AccelError, match="5 tokens, and decoder_seq_length is 4"):
        run(input_ids=ids, decoder_input_ids=ids[:, :5])
    with pytest.raises(AccelError, match="12 tokens, and decoder_seq_length is 4"):
        run(input_ids=ids)


def test_an_encoder_and_a_decoder_have_lengths_of_their_own(run_processes) -> None:
    run_processes(too_long_to_decode, world=1)


def test_a_sequence_longer_than_seq_length_is_refused(run_processes) -> None:
    run_processes(too_long, world=1)


def by_samples() -> list[float]:
    from accel_megatron import MegatronLMDummyScheduler

    ours = accelerator(train_samples=80)
    model = MODELS["gpt2"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rows = [{name: each[row] for name, each in batches(1, rows=32)[0].items()} for row in range(32)]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    schedule = MegatronLMDummyScheduler(optimizer)
    model, optimizer, loader, schedule = ours.prepare(model, optimizer, loader, schedule)
    rates = []
    for batch in loader:
        ours.backward(model(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    return rates


def test_a_schedule_by_samples_counts_those_of_all_ranks(run_processes) -> None:
    for rates in run_processes(by_samples):
        assert rates == pytest.approx([0.09, 0.08, 0.07, 0.06])


def resumed(folder: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Dropout and fp16 that overflows: losses and scales from the checkpoint on, and once more from it."""
    found: list[list[float]] = []
    for first in (True, False):
        options = {"initial_loss_scale": 2.0**30 if first else 2.0**8, "attention_dropout": 0.3}
        ours = accelerator(tp_degree=2, mixed_precision="fp16", other_megatron_args=options)
        model = MODELS["llama"](seed=3 if first else 4)
        model, optimizer = ours.prepare(model, optimizer_of(model))
        losses, scales = [], []
        if not first:
            ours.load_state(folder)
        for step in range(0 if first else 3, 5):
            if step == 3 and first:
                ours.save_state(folder)
            loss = model(**batches(1)[0]).loss
            ours.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            (stepper,) = ours.run.units[0].plugin.steppers.values()
            scales.append(float(stepper.inner.get_loss_scale()))
        found += [losses[-2:], scales[-2:]]
        ours.end_training()
    return found[0], found[1], found[2], found[3]


def test_the_loss_scale_and_megatrons_streams_go_on(tmp_path: Path, run_processes) -> None:
    for losses, scales, again, scales_again in run_processes(resumed, str(tmp_path / "saved")):
        assert again == losses
        assert scales_again == scales
        assert scales[0] < 2.0**28, "it must overflow to show anything"


def flagged() -> list[float]:
    """The loss of the same tokens, as transformers and as megatron-core's datasets have them."""
    ours = accelerator(tp_degree=2, megatron_dataset_flag=True)
    model = ours.prepare(MODELS["gpt2"]().eval())
    ids = batches(1)[0]["input_ids"]
    mask = torch.ones_like(ids[:, 1:], dtype=torch.float32)
    ways: list[dict[str, Any]] = [
        {"input_ids": ids, "labels": ids},
        {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask},
        {"text": ids},
        {"tokens": ids[:, :-1], "labels": ids[:, 1:] * 0, "loss_mask": mask * 0 + (ids[:, 1:] == 0)},
    ]
    with torch.no_grad():
        found = [float(model(**way).loss) for way in ways]
    with pytest.raises(AccelError, match="not 'tokens'"):
        accelerator_off(ours, model, ways[1])
    return found


def accelerator_off(ours: Any, model: Any, batch: dict[str, Any]) -> None:
    """The same call where the flag is not set."""
    from attrs import evolve

    model.plugin = evolve(model.plugin, megatron_dataset_flag=False)
    model(**batch)


def test_batches_of_megatrons_datasets_are_read_where_the_flag_is_set(run_processes) -> None:
    for transformers, new, old, masked in run_processes(flagged):
        assert new == pytest.approx(transformers, rel=1e-6)
        assert old == pytest.approx(transformers, rel=1e-6)
        assert masked != pytest.approx(transformers, rel=1e-3)


def by_the_names_of_others() -> tuple[list[float], str]:
    import cuda_on_cpu

    cuda_on_cpu.install()
    from accel_compat import install

    install()
    from accelerate import Accelerator
    from accelerate.utils import MegatronLMPlugin

    plugin = MegatronLMPlugin(tp_degree=2, num_micro_batches=4, gradient_clipping=0.5, seq_length=12)
    ours = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model = MODELS["gpt2"]()
    model, optimizer = ours.prepare(model, optimizer_of(model))
    losses = []
    for batch in batches(2):
        loss = model(**batch).loss
        ours.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with pytest.raises((AccelError, ValueError), match="log_with"):
        MegatronLMPlugin(tensorboard_dir="logs").to_ours()
    return losses, str(ours.distributed_type)


@pytest.mark.needs("accel-compat")
def test_accelerates_plugin_trains_through_accel_compat(run_processes) -> None:
    for losses, kind in run_processes(by_the_names_of_others):
        assert losses == pytest.approx(as_by_hand(), rel=1e-5)
        assert "MEGATRON_LM" in kind


def as_by_hand() -> list[float]:
    """The first two losses of plain PyTorch; the clip as there, the rate too."""
    model = MODELS["gpt2"]()
    optimizer = optimizer_of(model)
    losses = []
    for batch in batches(2):
        parts = [{name: each[at : at + 2] for name, each in batch.items()} for at in range(0, 8, 2)]
        mine = [model(**part).loss for part in parts]
        loss = torch.stack(mine).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def taken() -> list[int]:
    """How many micro-batches a window takes: by the options, with accumulation too, and as told."""
    ours = accelerator(num_micro_batches=3)
    model = ours.prepare(MODELS["gpt2"]())
    batch = batches(1)[0]

    def count(**told: Any) -> int:
        stream = iter([batch] * 9)
        ours.forward_backward(model, stream, lambda m, b: (m(**b).loss, None), forward_only=True, **told)
        return 9 - len(list(stream))

    found = [count()]
    ours.gradient_accumulation_steps = 2
    return [*found, count(), count(microbatches=1)]


def test_a_window_takes_as_many_micro_batches_as_a_step_of_a_loop(run_processes) -> None:
    assert run_processes(taken, world=1) == [[3, 6, 1]]


def contradicted() -> None:
    from accel_megatron import reconfigure

    ours = accelerator(custom_model_provider_function=len)
    with pytest.raises(AccelError, match="prepare what accel_megatron.build_model"):
        ours.prepare(MODELS["gpt2"]())
    assert reconfigure(ours, seq_length=8).seq_length == 8
    with pytest.raises(AccelError, match="give sizes to the Accelerator"):
        reconfigure(ours, tp_degree=2)
    with pytest.raises(AccelError, match="set parallelism.tp: 2 or more"):
        reconfigure(ours, sequence_parallelism=True)
    with pytest.raises(AccelError, match="said by the model"):
        reconfigure(ours, other_megatron_args={"hidden_size": 32})
    with pytest.raises(AccelError, match="overlap_param_gather: it needs use_distributed_optimizer"):
        reconfigure(ours, other_megatron_args={"overlap_param_gather": True})


def test_options_that_contradict_the_model_or_each_other_are_refused(run_processes) -> None:
    run_processes(contradicted, world=1)


def too_late() -> None:
    from accel_megatron import reconfigure

    ours = accelerator(num_micro_batches=2)
    ours.prepare(MODELS["gpt2"]())
    assert reconfigure(ours, num_micro_batches=2, eval_iters=5).eval_iters == 5
    with pytest.raises(AccelError, match="num_micro_batches: a model is prepared already, with 2, not 4"):
        reconfigure(ours, num_micro_batches=4)


def test_what_a_prepared_model_was_made_with_stays(run_processes) -> None:
    run_processes(too_late, world=1)


def divided_again() -> None:
    ours = accelerator(tp_degree=2)
    model = MODELS["llama"]()
    groups = [{"params": [each]} for each in model.parameters()]
    with pytest.raises(AccelError, match="one tensor in megatron-core"):
        ours.prepare(model, torch.optim.AdamW(groups))
    ours.end_training()
    accelerator(pp_degree=2).prepare(MODELS["llama"]())


def test_a_model_that_could_not_be_prepared_leaves_the_ranks_to_others(run_processes) -> None:
    run_processes(divided_again)
