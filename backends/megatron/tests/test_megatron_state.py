"""A checkpoint is of the user's model: any layout resumes what any other, or none, has saved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from megatron_jobs import MODELS, accelerator, batches, go_on, optimizer_of

NATIVE: dict[str, Any] = {"strategy": "single"}
GRID = {"tp_degree": 2, "pp_degree": 2, "use_distributed_optimizer": True}
INTERLEAVED = {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 4}


@pytest.mark.parametrize(
    ("kind", "saver", "loader"),
    [
        ("gpt2", (1, NATIVE), (2, {"pp_degree": 2})),
        ("llama", (2, {"tp_degree": 2}), (1, NATIVE)),
        ("gpt2", (4, GRID), (2, {"use_distributed_optimizer": True})),
        ("llama", (2, {"use_distributed_optimizer": True}), (2, INTERLEAVED)),
        ("gpt2", (2, {"tp_degree": 2, "use_distributed_optimizer": True}), (4, GRID)),
        pytest.param("llama", (4, GRID), (1, {}), marks=pytest.mark.full),
        pytest.param("llama", (2, INTERLEAVED), (4, GRID), marks=pytest.mark.full),
        pytest.param(
            "gpt2",
            (2, {"strategy": "ddp"}),
            (4, GRID),
            marks=[pytest.mark.full, pytest.mark.needs("accel-ddp")],
        ),
        pytest.param(
            "llama",
            (4, GRID),
            (2, {"strategy": "ddp"}),
            marks=[pytest.mark.full, pytest.mark.needs("accel-ddp")],
        ),
        pytest.param(
            "gpt2",
            (4, GRID),
            (2, {"strategy": "fsdp"}),
            marks=[pytest.mark.full, pytest.mark.needs("accel-fsdp")],
        ),
        pytest.param(
            "llama",
            (2, {"strategy": "fsdp"}),
            (4, GRID),
            marks=[pytest.mark.full, pytest.mark.needs("accel-fsdp")],
        ),
    ],
)
@pytest.mark.by_default
def test_it_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, kind: str, saver: tuple[int, Any], loader: tuple[int, Any], run_processes
) -> None:
    (whole, rates), *_ = run_processes(go_on, kind, NATIVE, str(tmp_path / "whole"), 0, 4, world=1)
    folder = str(tmp_path / "parts")
    for losses, _ in run_processes(go_on, kind, saver[1], folder, 0, 2, world=saver[0]):
        assert losses == pytest.approx(whole[:2], rel=1e-5)
    for losses, now in run_processes(go_on, kind, loader[1], folder, 2, 4, world=loader[0]):
        assert losses == pytest.approx(whole[2:], rel=1e-4)
        assert now == pytest.approx(rates)


def told(folder: str, frozen: str | None, first: bool) -> list[str]:
    """What is logged when a run loads; weights whose name begins with `frozen` do not train in it."""
    said: list[str] = []
    state = logging.getLogger("accel_megatron.state")
    state.addFilter(lambda record: said.append(record.getMessage()) is not None)
    ours = accelerator(tp_degree=2, use_distributed_optimizer=True)
    model, batch = MODELS["gpt2"](), batches(1)[0]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or not name.startswith(frozen))
    model, optimizer = ours.prepare(model, optimizer_of(model))
    if not first:
        ours.load_state(folder)
    ours.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    if first:
        ours.save_state(folder)
    ours.end_training()
    return said


@pytest.mark.full
def test_state_of_what_is_frozen_since_is_left_out_and_named(tmp_path: Path, run_processes) -> None:
    before, since = str(tmp_path / "before"), str(tmp_path / "since")
    run_processes(told, before, "transformer.wpe", True)
    run_processes(told, since, None, True)

    assert run_processes(told, before, "transformer.wpe", False) == [[], []]
    for said in run_processes(told, since, "transformer.wpe", False):
        (one,) = said
        assert one.startswith(
            "megatron: the checkpoint has optimizer state of transformer.wpe.weight, frozen here;"
        )
