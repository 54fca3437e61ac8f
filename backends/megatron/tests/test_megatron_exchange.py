"""megatron-core's own directories: what one layout exports another imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import MODELS, accelerator, batches, optimizer_of

from accel_core import CheckpointError

pytestmark = pytest.mark.full


def step(ours: Any, model: Any, optimizer: Any, number: int) -> float:
    batch = {"input_ids": batches(4)[number]["input_ids"], "labels": batches(4)[number]["input_ids"]}
    readers = ours.run.topology
    mine = {name: each[readers.reader :: readers.readers] for name, each in batch.items()}
    loss = model(**mine).loss
    ours.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(ours.reduce(loss.detach(), reduction="mean"))


def exported(options: dict[str, Any], folder: str) -> float:
    from accel_megatron import export_checkpoint

    ours = accelerator(**options)
    model = MODELS["llama"]()
    model, optimizer = ours.prepare(model, optimizer_of(model))
    step(ours, model, optimizer, 0)
    export_checkpoint(ours, model, folder)
    found = step(ours, model, optimizer, 1)
    ours.end_training()
    return found


def imported(options: dict[str, Any], folder: str) -> float:
    from accel_megatron import import_checkpoint

    ours = accelerator(**options)
    model = MODELS["llama"](seed=9)
    model, optimizer = ours.prepare(model, optimizer_of(model))
    with pytest.raises(CheckpointError, match="is not a directory of megatron-core"):
        import_checkpoint(ours, model, f"{folder}-not")
    import_checkpoint(ours, model, folder)
    return step(ours, model, optimizer, 1)


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ({"tp_degree": 2}, {"pp_degree": 2}),
        ({"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}, {"tp_degree": 2}),
    ],
)
def test_another_layout_goes_on(
    tmp_path: Path, saver: dict[str, Any], loader: dict[str, Any], run_processes
) -> None:
    folder = str(tmp_path / "iter_0000001")
    wanted = run_processes(exported, saver, folder)
    found = run_processes(imported, loader, folder)
    assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-5)


def distributed(folder: str) -> float:
    from accel_megatron import export_checkpoint, import_checkpoint

    ours = accelerator(use_distributed_optimizer=True)
    model = MODELS["gpt2"]()
    model, optimizer = ours.prepare(model, optimizer_of(model))
    with pytest.raises(CheckpointError, match="optimizer=False"):
        export_checkpoint(ours, model, folder)
    export_checkpoint(ours, model, folder, optimizer=False)
    before = ours.get_state_dict(model, rank0_only=False)
    step(ours, model, optimizer, 0)
    import_checkpoint(ours, model, folder, optimizer=False)
    after = ours.get_state_dict(model, rank0_only=False)
    return max(float((after[name] - before[name]).abs().max()) for name in before)


def of_any_model(folder: str) -> float:
    from accel_megatron import export_checkpoint, import_checkpoint

    ours = accelerator()
    made = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model, optimizer = ours.prepare(made, torch.optim.AdamW(made.parameters()))
    inputs = torch.rand(4, 3)

    def step() -> dict[str, torch.Tensor]:
        ours.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return {name: each.clone() for name, each in ours.get_state_dict(model, rank0_only=False).items()}

    step()
    export_checkpoint(ours, model, folder)
    wanted = step()
    step()
    import_checkpoint(ours, model, folder)
    found = step()
    return max(float((found[name] - each).abs().max()) for name, each in wanted.items())


def test_any_model_is_exported_by_its_own_names(tmp_path: Path, run_processes) -> None:
    assert run_processes(of_any_model, str(tmp_path / "any")) == [0.0, 0.0]


def test_without_its_own_steps_a_distributed_optimizer_is_left_out(tmp_path: Path, run_processes) -> None:
    assert run_processes(distributed, str(tmp_path / "weights")) == [0.0, 0.0]


def stepped_just_now(folder: str) -> float:
    from accel_megatron import export_checkpoint, import_checkpoint

    gathers = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    ours = accelerator(use_distributed_optimizer=True, other_megatron_args=gathers)
    model = MODELS["gpt2"]()
    model, optimizer = ours.prepare(model, optimizer_of(model))
    step(ours, model, optimizer, 0)
    export_checkpoint(ours, model, folder, optimizer=False)
    wanted = {name: each.clone() for name, each in ours.get_state_dict(model, rank0_only=False).items()}
    import_checkpoint(ours, model, folder, optimizer=False)
    found = ours.get_state_dict(model, rank0_only=False)
    return max(float((found[name] - each).abs().max()) for name, each in wanted.items())


def test_weights_that_are_still_on_their_way_are_waited_for(tmp_path: Path, run_processes) -> None:
    assert run_processes(stepped_just_now, str(tmp_path / "new")) == [0.0, 0.0]
