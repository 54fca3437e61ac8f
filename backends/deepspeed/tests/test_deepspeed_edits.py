"""Weights that are written between steps: by `load_state_dict`, or inside `full_parameters`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_problem import accelerator
from torch import Tensor, nn

from accel_deepspeed import DeepSpeedPlugin

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

BOUND = 0.15


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-BOUND, BOUND)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: each.clamp(-BOUND, BOUND) for name, each in model.state_dict().items()})


def load_a_part(model: nn.Module) -> None:
    load(model[0])  # type: ignore[index]


LOADS: dict[str, Callable[[nn.Module], None]] = {"model": load, "part": load_a_part}


def loop(model: Any, optimizer: Any, backward: Callable[[Tensor], None], edit: Callable[[], None]) -> None:
    for step in range(4):
        edit()
        batch = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        backward(model(batch).float().square().sum())
        optimizer.step()
        optimizer.zero_grad()


def plain(which: str) -> list[Tensor]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loop(model, optimizer, lambda loss: loss.backward(), lambda: LOADS[which](model))
    LOADS[which](model)
    return [each.clone() for each in model.state_dict().values()]


def loaded(stage: int, offload: str) -> dict[str, list[Tensor]]:
    found = {}
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage, offload_optimizer_device=offload))
    for which, write in LOADS.items():
        model = network()
        model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        user = ours.unwrap_model(model)
        loop(model, optimizer, ours.backward, lambda write=write, user=user: write(user))  # type: ignore[misc]
        write(user)
        found[which] = [each.clone() for each in ours.get_state_dict(model, rank0_only=False).values()]
    return found


@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "none"), (2, "none"), (2, "cpu")])
def test_the_next_step_and_the_next_save_start_from_loaded_weights(
    stage: int, offload: str, run_processes
) -> None:
    for found in run_processes(loaded, stage, offload, timeout=250):
        for which, weights in found.items():
            torch.testing.assert_close(
                weights, plain(which), msg=lambda text, which=which: f"{which}: {text}"
            )


def weights_in_float32(ours: Any, model: Any) -> Tensor:
    return torch.cat([each.flatten() for _, each in ours.iter_weights(model, dtype=torch.float32)])


def reloaded(stage: int) -> tuple[Tensor, Tensor]:
    """The float32 weights before and after half of bfloat16's are loaded."""
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage), mixed_precision="bf16")
    model = network()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loop(model, optimizer, ours.backward, lambda: None)
    before = weights_in_float32(ours, model)
    user = ours.unwrap_model(model)
    first = {name: torch.full_like(each, 0.5) for name, each in user[0].state_dict().items()}  # type: ignore[index]
    user.load_state_dict(user.state_dict() | {f"0.{name}": each for name, each in first.items()})
    optimizer.param_groups[0]["lr"] = 0.0
    loop(model, optimizer, ours.backward, lambda: None)
    return before, weights_in_float32(ours, model)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_in_16_bits_that_are_loaded_as_they_are_keep_the_digits_of_their_masters(
    stage: int, run_processes
) -> None:
    for before, after in run_processes(reloaded, stage, timeout=250):
        assert torch.equal(after[:20], torch.full((20,), 0.5))
        assert torch.equal(after[20:], before[20:])


def gathered(threshold: int, folder: str) -> list[Tensor]:
    """Training with edits in `full_parameters`, and with all that gathers or loads besides."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    ours = accelerator(
        DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero}), gradient_accumulation_steps=2
    )
    model = network()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        with ours.full_parameters(model, writeback=True):
            clamp(ours.unwrap_model(model))
        for _ in range(2):
            with ours.accumulate(model):
                ours.backward(model(torch.full((2, 3), 1.0 + step)).square().sum())
                with torch.no_grad(), ours.full_parameters(model):
                    model(torch.ones(2, 3))
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            model(torch.ones(2, 3))
        model.train()
        ours.save_state(folder)
        ours.load_state(folder)
        model.save_checkpoint(f"{folder}-by-the-engine")
        model.load_checkpoint(f"{folder}-by-the-engine")
    return [each.clone() for each in ours.get_state_dict(model, rank0_only=False).values()]


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_stage_3_keeps_what_is_written_in_full_parameters(
    threshold: int, tmp_path: Path, run_processes
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        clamp(model)
        model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_processes(gathered, threshold, str(tmp_path), timeout=250):
        torch.testing.assert_close(found, [each.clone() for each in model.state_dict().values()])
