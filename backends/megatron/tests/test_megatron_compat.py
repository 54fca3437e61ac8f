"""Programs that Accelerate documents for Megatron, run as they are through accel-compat."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import MODELS, VOCABULARY, batches, optimizer_of, quiet, write_indexed_text

END = VOCABULARY - 1

pytestmark = pytest.mark.needs("accel-compat", "transformers")


def installed() -> None:
    import cuda_on_cpu

    cuda_on_cpu.install()
    with quiet():
        import megatron.core.optimizer  # noqa: F401 - warns of what it does not find
    from accel_compat import install

    install()


def accelerate(**options: Any) -> Any:
    installed()
    from accelerate import Accelerator
    from accelerate.utils import MegatronLMPlugin

    return Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options))


def with_a_loss_of_its_own() -> tuple[list[float], list[float], int]:
    """The documented train step, set on the state's plugin; beside it the same in plain PyTorch."""
    accelerator = accelerate(tp_degree=2, num_micro_batches=2, gradient_clipping=0.0)
    from accelerate.utils import (
        GPTTrainStep,
        MegatronLMDummyScheduler,
        avg_losses_across_data_parallel_group,
    )

    class GPTTrainStepWithCustomLoss(GPTTrainStep):
        def __init__(self, megatron_args: Any, **kwargs: Any) -> None:
            super().__init__(megatron_args)
            self.kwargs = kwargs

        def get_loss_func(self) -> Any:
            def loss_func(inputs: Any, loss_mask: Any, output_tensor: Any) -> Any:
                batch_size, seq_length = output_tensor.shape
                losses = output_tensor.float()
                loss_mask = loss_mask.view(-1).float()
                loss = losses.view(-1) * loss_mask
                loss_per_sample = loss.view(batch_size, seq_length).sum(axis=1)
                loss_mask_per_sample = loss_mask.view(batch_size, seq_length).sum(axis=1)
                loss_per_sample = loss_per_sample / loss_mask_per_sample
                weights = torch.stack([(inputs == kt).float() for kt in self.kwargs["keytoken_ids"]])
                weights = 1.0 + self.kwargs["alpha"] * weights.sum(axis=[0, 2])
                weighted_loss = (loss_per_sample * weights).mean()
                averaged_loss = avg_losses_across_data_parallel_group([weighted_loss])
                return weighted_loss, {"lm loss": averaged_loss[0]}

            return loss_func

        def get_forward_step_func(self) -> Any:
            def forward_step(data_iterator: Any, model: Any) -> Any:
                tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
                output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
                return output_tensor, partial(self.loss_func, tokens, loss_mask)

            return forward_step

    accelerator.state.megatron_lm_plugin.custom_train_step_class = GPTTrainStepWithCustomLoss
    accelerator.state.megatron_lm_plugin.custom_train_step_kwargs = {"keytoken_ids": [4, 9], "alpha": 0.25}
    model, plain = (MODELS["gpt2"](eos_token_id=END) for _ in range(2))
    optimizer = optimizer_of(model)
    rows = [{"input_ids": row} for batch in batches(2) for row in batch["input_ids"]]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    schedule = MegatronLMDummyScheduler(optimizer=optimizer, total_num_steps=10, warmup_num_steps=0)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    found = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    assert schedule.get_last_lr()[0] == pytest.approx(1e-2 * 0.8)
    return found, in_plain_pytorch(plain), accelerator.state.megatron_lm_plugin.global_batch_size


def in_plain_pytorch(model: Any) -> list[float]:
    optimizer, found = optimizer_of(model), []
    for step, batch in enumerate(batches(2)):
        ids = batch["input_ids"]
        following = torch.cat([ids[:, 1:], torch.full((8, 1), END)], 1)
        logits = model(input_ids=ids).logits.transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(logits, following, reduction="none")
        counts = (ids != END).float()
        weights = 1 + 0.25 * ((ids == 4) | (ids == 9)).sum(1)
        loss = ((losses * counts).sum(1) / counts.sum(1) * weights).mean()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / 10)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def test_the_documented_train_step_judges_by_its_own_loss(run_processes) -> None:
    for found, wanted, size in run_processes(with_a_loss_of_its_own):
        assert size == 8
        assert found == pytest.approx(wanted, rel=1e-4)


def over_other_data() -> tuple[list[float], list[float], float]:
    """(Losses of training, of evaluation, plain PyTorch's mean of the evaluation), as documented."""
    accelerator = accelerate(gradient_clipping=0.0)
    batch = batches(1)[0]
    rows = [{name: each[row] for name, each in batch.items()} for row in range(8)]
    model, plain = MODELS["gpt2"](), MODELS["gpt2"]()
    loaders = [torch.utils.data.DataLoader(rows, batch_size=2) for _ in range(2)]
    model, optimizer, loader, tests = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.0), *loaders
    )
    trained, losses = [], []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        trained.append(float(loss.detach()))
    model.eval()
    for batch in tests:
        with torch.no_grad():
            losses.append(float(model(**batch).loss))  # averaged already, says the guide
    parts = [
        {name: torch.stack([row[name] for row in rows[at : at + 2]]) for name in rows[0]}
        for at in (0, 2, 4, 6)
    ]
    wanted = [float(plain(**part).loss.detach()) for part in parts]
    return trained, losses, sum(wanted) / 4


def test_the_loss_is_that_of_all_data_as_megatron_lms(run_processes) -> None:
    """Each rank had the loss of its own rows, which the documented evaluation takes for the whole."""
    for trained, losses, wanted in run_processes(over_other_data):
        assert trained == pytest.approx(losses, rel=1e-4)
        assert sum(losses) / len(losses) == pytest.approx(wanted, rel=1e-4)


def judged() -> tuple[float, float]:
    """The loss of a function in Megatron-LM's words, and three times plain PyTorch's."""

    def tripled(loss_mask: Any, output_tensor: Any) -> Any:
        assert loss_mask.shape == output_tensor.shape
        return output_tensor[:, :-1].mean() * 3, {}

    accelerator = accelerate(custom_loss_function=tripled, use_distributed_optimizer=True)
    model, batch = MODELS["gpt2"](eos_token_id=END).eval(), batches(1)[0]
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["labels"] = batch["input_ids"]
    with torch.no_grad():
        wanted = float(model(**batch).loss)
        loss = accelerator.prepare(model)(**batch).loss
    return float(loss), 3 * wanted


def test_a_loss_function_in_megatrons_words_judges_the_models_own_step(run_processes) -> None:
    for loss, wanted in run_processes(judged):
        assert loss == pytest.approx(wanted, rel=1e-4)


def by_variables() -> tuple[Any, ...]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    (plugin,) = (each for each in accelerator.run.plugins.values() if hasattr(each, "steppers"))
    config = plugin.config
    return config.tp, config.use_distributed_optimizer, dict(config.other_megatron_args)


def with_variables() -> tuple[Any, ...]:
    import os

    names = {"TP_DEGREE": "2", "USE_DISTRIBUTED_OPTIMIZER": "true", "ATTENTION_DROPOUT": "0.25"}
    os.environ |= {f"MEGATRON_LM_{name}": value for name, value in names.items()}
    os.environ["ACCELERATE_USE_MEGATRON_LM"] = "true"
    installed()
    return by_variables()


def test_variables_of_accelerates_launcher_choose_it_and_its_options(run_processes) -> None:
    wanted = (2, True, {"attention_dropout": 0.25})
    assert run_processes(with_variables) == [wanted, wanted]


def over_indexed_files(folder: str) -> tuple[list[float], int]:
    accelerator = accelerate(tp_degree=2, num_micro_batches=2, train_iters=4, eval_iters=2, eval_interval=2)
    from accelerate.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler

    if accelerator.is_main_process:
        write_indexed_text(folder)
    accelerator.wait_for_everyone()
    megatron_dataloader = MegatronLMDummyDataLoader(
        data_path=f"{folder}/text",
        splits_string="60,40,0",
        seq_length=12,
        micro_batch_size=4,
        path_to_cache=f"{folder}/cache",
    )
    accelerator.state.megatron_lm_plugin.megatron_dataset_flag = True
    model = MODELS["gpt2"](eos_token_id=END)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = MegatronLMDummyScheduler(optimizer)
    model, optimizer, lr_scheduler, train_dataloader, eval_dataloader, none = accelerator.prepare(
        model, optimizer, lr_scheduler, megatron_dataloader, megatron_dataloader, megatron_dataloader
    )
    assert none is None
    losses, completed_steps = [], 0
    while completed_steps < 4:
        model.train()
        batch = next(train_dataloader) if train_dataloader is not None else {}
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        completed_steps += 1
        if completed_steps % 2 == 0:
            model.eval()
            for _ in range(2):
                with torch.no_grad():
                    model(**next(eval_dataloader))
    return losses, len(batch["input_ids"])


def test_a_stand_in_gives_loaders_of_indexed_files(tmp_path: Path, run_processes) -> None:
    one, other = run_processes(over_indexed_files, str(tmp_path))
    assert one == other
    losses, rows = one
    assert losses == sorted(losses, reverse=True)
    assert rows == 8
