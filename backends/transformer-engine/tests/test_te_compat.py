"""fp8 by Transformer Engine, as programs written for Accelerate ask for it; needs accel-compat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch import nn

compat = pytest.importorskip("accel_compat")
pytestmark = pytest.mark.needs("accel-compat")
compat.install()

from accelerate import Accelerator  # noqa: E402 - accel-compat's
from accelerate.utils import FP8RecipeKwargs, TERecipeKwargs  # noqa: E402


@pytest.fixture(autouse=True)
def no_run_is_left() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    while (run := compat.runs.newest()) is not None:
        run.end()


def trained(handler: Any) -> tuple[Any, Any]:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(model(torch.ones(16, 16)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert [name for name, value in model.state_dict().items() if torch.equal(value, before[name])] == []
    return accelerator, model


@pytest.mark.parametrize("handler", [TERecipeKwargs, lambda: FP8RecipeKwargs(backend="te")])
def test_every_weight_trains_at_the_documented_defaults(handler: Any) -> None:
    accelerator, model = trained(handler())
    assert (accelerator.fp8_backend, accelerator.mixed_precision) == ("TE", "fp8")
    assert accelerator.fp8_enabled
    assert all(isinstance(layer, te.Linear) for layer in model)
    recipe = model[0].fp8_meta["recipe"]
    assert (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo) == (0, 1024, "most_recent")


def test_every_argument_does_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ours: Any = TERecipeKwargs(
        use_autocast_during_eval=True,
        margin=2,
        fp8_format="E4M3",
        amax_history_len=8,
        amax_compute_algo="max",
    ).to_ours()
    assert (ours.recipe, ours.in_evaluation, ours.format) == ("delayed", True, "E4M3")
    assert (ours.margin, ours.amax_history_len, ours.amax_compute_algo) == (2, 8, "max")
    block: Any = TERecipeKwargs(
        use_mxfp8_block_scaling=True, override_linear_precision=(False, True, True)
    ).to_ours()
    assert (block.recipe, block.high_precision_backward) == ("mxfp8", True)
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "3")
    monkeypatch.setenv("ACCELERATE_FP8_FORMAT", "E4M3")
    told: Any = TERecipeKwargs().to_ours()
    assert (told.margin, told.format) == (3, "E4M3")


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"interval": 2}, "interval=2: Transformer Engine computes scales in every step"),
        ({"override_linear_precision": (True, False, False)}, "computes both products of the backward"),
        ({"use_mxfp8_block_scaling": True, "margin": 1}, "margin: MXFP8 block scaling has no history"),
        ({"fp8_format": "E5M2"}, "E5M2"),
    ],
)
def test_an_argument_without_a_meaning_is_refused(argument: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TERecipeKwargs(**argument).to_ours()


def trainer(folder: Path) -> Any:
    """transformers' Trainer on a tiny Llama with random weights."""
    transformers = pytest.importorskip("transformers")
    transformers.set_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, intermediate_size=64, bos_token_id=None, eos_token_id=None, **sizes
        )
    )
    rows = torch.randint(1, 64, (24, 16), generator=torch.Generator().manual_seed(1))
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return transformers.Trainer(
        llama, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]
    )


@pytest.mark.timeout(300)
def test_the_trainer_of_transformers_trains_every_weight_in_float8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --mixed_precision fp8 --fp8_backend te` sets these variables."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    trains = trainer(tmp_path)
    before = {name: weight.clone() for name, weight in trains.model.named_parameters()}
    trains.train()
    llama = trains.model
    assert (trains.accelerator.fp8_backend, trains.accelerator.mixed_precision) == ("TE", "fp8")
    assert isinstance(llama.model.layers[0].mlp.up_proj, te.Linear)
    assert [name for name, weight in llama.named_parameters() if torch.equal(weight, before[name])] == []
