"""A model of transformers goes to megatron-core and back without the loss of a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import MODELS, accelerator, quiet


def there_and_back(kind: str, options: dict[str, Any], folder: str) -> bool:
    ours = accelerator(**options)
    with ours.model_init_context():
        model = MODELS[kind](seed=4 + ours.process_index)
    assert next(model.parameters()).is_meta is (ours.process_index > 0), "others hold no weights at any time"
    given = {name: each.clone() for name, each in model.state_dict().items()}
    prepared = ours.prepare(model)
    found = ours.get_state_dict(prepared, rank0_only=False)
    assert bool(ours.get_state_dict(prepared)) is (ours.process_index == 0), "rank 0 alone gets them"
    ours.save_model(prepared, folder)
    with quiet():
        again = type(model).from_pretrained(None, config=model.config, state_dict=found).state_dict()
    held = sum(each.numel() for each in prepared.chunks.parameters())
    whole = sum(each.numel() for each in {id(p): p for p in model.parameters()}.values())
    assert held < 0.8 * whole, "a rank has its own part only"
    assert found.keys() == given.keys() == again.keys()
    return ours.process_index > 0 or all(
        torch.equal(found[name], given[name]) and torch.equal(again[name], given[name]) for name in given
    )


@pytest.mark.parametrize(
    ("kind", "options", "world"),
    [
        ("gpt2", {"tp_degree": 2}, 2),
        ("llama", {"pp_degree": 2}, 2),
        ("bert", {"tp_degree": 2}, 2),
        pytest.param("llama", {"tp_degree": 2, "pp_degree": 2}, 4, marks=pytest.mark.full),
    ],
)
@pytest.mark.by_default
def test_every_bit_comes_back(
    tmp_path: Path, kind: str, options: dict[str, Any], world: int, run_processes
) -> None:
    assert all(run_processes(there_and_back, kind, options, str(tmp_path), world=world))
    assert (tmp_path / "model.safetensors").exists()


def drawn() -> float:
    """Ranks of one layer that nobody has seeded drop the same units, or they would train two models."""
    torch.seed()
    ours = accelerator(tp_degree=2)
    model = MODELS["llama"](attention_dropout=0.0)
    model = ours.prepare(model)
    return float(torch.rand((), device="cuda"))


def test_ranks_that_share_a_layer_draw_the_same(run_processes) -> None:
    one, other = run_processes(drawn)
    assert one == other
