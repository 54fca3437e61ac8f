"""A training step of one's own, in the form that megatron-core's schedule takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from megatron_jobs import MODELS, VOCABULARY, accelerator, batches, optimizer_of
from torch import Tensor, nn

from accel_core import AccelError


class Weighted:
    """Tokens of a kind count more."""

    def __init__(self, options: Any, *, token: int, weight: float) -> None:
        self.token, self.weight, self.logits = token, weight, options.return_logits

    def forward_step(self, batches: Iterator[Any], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        ids = next(batches)["ids"]
        tokens, labels = ids[:, :-1], ids[:, 1:].contiguous()
        later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        output = chunk(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), later, labels=labels)
        return output, partial(self.loss, labels)

    def loss(self, labels: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Any]]:
        loss = (losses * torch.where(labels == self.token, self.weight, 1.0)).mean()
        return loss, {"logits": losses.detach()} if self.logits else {}


def odd(seed: int = 3) -> Any:
    """A model whose vocabulary two ranks do not divide."""
    model: Any = MODELS["gpt2"](seed)
    model.resize_token_embeddings(VOCABULARY - 1)
    return model


def trained(options: dict[str, Any]) -> tuple[list[float], list[float], Any]:
    """Losses of two steps, with plain PyTorch's, and what is given beside the loss."""
    ours = accelerator(
        num_micro_batches=2,
        custom_train_step_class=Weighted,
        custom_train_step_kwargs={"token": 5, "weight": 4.0},
        return_logits=True,
        **options,
    )
    model, plain = odd(), odd()
    plain.load_state_dict(model.state_dict())
    model, optimizer = ours.prepare(model, optimizer_of(model))
    reference, found, wanted = optimizer_of(plain), [], []
    for batch in batches(2):
        ids = batch["input_ids"] % (VOCABULARY - 1)
        output = model(ids=ids)
        ours.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(output.loss.detach()))
        logits = plain(input_ids=ids[:, :-1]).logits.transpose(1, 2)
        losses = nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none")
        loss = (losses * torch.where(ids[:, 1:] == 5, 4.0, 1.0)).mean()
        loss.backward()
        reference.step()
        reference.zero_grad()
        wanted.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        model(ids=ids)
    return found, wanted, output.logits.shape


@pytest.mark.parametrize(
    "options",
    [
        {"tp_degree": 2},
        {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "seq_length": 11},
        {"pp_degree": 2, "encoder_seq_length": 11},
    ],
)
@pytest.mark.by_default
def test_it_reads_computes_and_judges_each_micro_batch(options: dict[str, Any], run_processes) -> None:
    for found, wanted, shape in run_processes(trained, options):
        assert found == pytest.approx(wanted, rel=1e-4)
        assert shape == (8, 11)


def refused() -> None:
    ours = accelerator(custom_train_step_class=Weighted, other_megatron_args={"attention_dropout": 0.5})
    with pytest.raises(
        AccelError, match=r"custom_train_step_class, megatron\.other_megatron_args\.attention"
    ):
        ours.prepare(torch.nn.Linear(2, 2))


def test_a_model_with_a_forward_of_its_own_has_none_and_no_layers_to_tell(run_processes) -> None:
    run_processes(refused, world=1)
