"""Weights that are edited in place between steps: trained on from, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_problem import accelerator
from torch import Tensor, nn

from accel_core import AccelError
from accel_deepspeed import DeepSpeedPlugin

pytestmark = pytest.mark.full

BOUND = 0.15


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-BOUND, BOUND)


def clamp_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-BOUND, BOUND)


def assign(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-BOUND, BOUND)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: each.clamp(-BOUND, BOUND) for name, each in model.state_dict().items()})


def reorder(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.flip(0))


def change_one_digit(model: nn.Module) -> None:
    next(iter(model.parameters())).data[0, 0] += 0.25


def swap_for_evaluation(model: nn.Module) -> None:
    """An average of weights that is evaluated, and put away again."""
    stored = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        model(torch.ones(1, 3, dtype=next(model.parameters()).dtype))
        for parameter, kept in zip(model.parameters(), stored, strict=True):
            parameter.data.copy_(kept)


EDITS: dict[str, Callable[[nn.Module], None]] = {
    each.__name__: each
    for each in (clamp, clamp_data, assign, load, reorder, change_one_digit, swap_for_evaluation)
}


def loop(model: Any, optimizer: Any, backward: Callable[[Tensor], None], edit: Callable[[], None]) -> None:
    for step in range(4):
        edit()
        batch = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        backward(model(batch).float().square().sum())
        optimizer.step()
        optimizer.zero_grad()


def plain(edit: str) -> list[Tensor]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loop(model, optimizer, lambda loss: loss.backward(), lambda: EDITS[edit](model))
    EDITS[edit](model)
    return [each.clone() for each in model.state_dict().values()]


def edited(stage: int, offload: str) -> dict[str, list[Tensor]]:
    found = {}
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage, offload_optimizer_device=offload))
    for name, edit in EDITS.items():
        model = network()
        model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        user = ours.unwrap_model(model)
        loop(model, optimizer, ours.backward, partial(edit, user))
        edit(user)
        found[name] = [each.clone() for each in ours.get_state_dict(model).values()]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "none"), (2, "none"), (2, "cpu")])
def test_the_next_step_and_the_next_save_start_from_edited_weights(
    stage: int, offload: str, run_processes
) -> None:
    for found in run_processes(edited, stage, offload, timeout=250):
        for edit, weights in found.items():
            torch.testing.assert_close(weights, plain(edit), msg=lambda text, edit=edit: f"{edit}: {text}")


def halved(stage: int) -> list[tuple[Tensor, Tensor]]:
    """Of each edit in bfloat16: the float32 weights, and those before an edit of half of them."""
    found = []
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage), mixed_precision="bf16")
    for assigns in (False, True):
        model = network()
        model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        loop(model, optimizer, ours.backward, lambda: None)
        before = weights_in_float32(ours, model)
        optimizer.param_groups[0]["lr"] = 0.0
        for parameter in list(ours.unwrap_model(model).parameters())[:2]:
            if assigns:
                parameter.data = torch.full_like(parameter.data, 0.5)
            else:
                parameter.data.fill_(0.5)
        loop(model, optimizer, ours.backward, lambda: None)
        found.append((weights_in_float32(ours, model), before))
        for parameter in list(ours.unwrap_model(model).parameters())[:2]:
            assert torch.equal(parameter, torch.full_like(parameter, 0.5))
        optimizer.param_groups[0]["lr"] = 0.01
        loop(model, optimizer, ours.backward, lambda: None)
        mine = torch.cat([each.detach().float().flatten() for each in ours.unwrap_model(model).parameters()])
        assert torch.equal(mine, weights_in_float32(ours, model).bfloat16().float())  # forward follows
    return found


def weights_in_float32(ours: Any, model: Any) -> Tensor:
    return torch.cat([each.flatten() for _, each in ours.iter_weights(model, dtype=torch.float32)])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_in_16_bits_that_were_not_edited_keep_the_digits_of_their_masters(
    stage: int, run_processes
) -> None:
    for found in run_processes(halved, stage, timeout=250):
        for after, before in found:
            assert torch.equal(after[:20], torch.full((20,), 0.5))
            assert torch.equal(after[20:], before[20:])


def refused(threshold: int) -> dict[str, str]:
    said = {}
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    ours = accelerator(DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero}))
    for edit in ("clamp", "clamp_data"):
        model = network()
        model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loop(model, optimizer, ours.backward, lambda: None)
        EDITS[edit](ours.unwrap_model(model))
        for use in (optimizer.step, lambda m=model, o=ours: o.get_state_dict(m)):  # type: ignore[misc]
            try:
                ours.backward(model(torch.ones(2, 3)).sum())
                use()
            except AccelError as error:
                said[edit] = str(error)
            else:
                said.pop(edit, None)
    return said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("threshold", [0, 100_000])
def test_stage_3_refuses_edits_of_partitioned_weights(threshold: int, run_processes) -> None:
    for said in run_processes(refused, threshold, timeout=250):
        assert "0.weight" in said["clamp"]
        assert "full_parameters(model, writeback=True)" in said["clamp"].splitlines()[-1]
        # `.data` of an empty weight leaves no trace
        assert ("clamp_data" in said) == (threshold > 0)


def served(threshold: int, folder: str) -> list[Tensor]:
    """Training with all that gathers, loads or skips, none of which is an edit, and edits that are kept."""
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
                    swap_for_evaluation(ours.unwrap_model(model))
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
    return [each.clone() for each in ours.get_state_dict(model).values()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("threshold", [0, 100_000])
def test_stage_3_takes_no_work_of_its_own_for_an_edit(threshold: int, tmp_path: Path, run_processes) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        clamp(model)
        model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_processes(served, threshold, str(tmp_path), timeout=250):
        torch.testing.assert_close(found, [each.clone() for each in model.state_dict().values()])


def changed(stage: int, change: str) -> str | None:
    """The error of a step after `change`, if there is one."""
    run = accelerator(DeepSpeedPlugin(zero_stage=stage))
    given = network()
    groups = [{"params": given[0].parameters()}, {"params": given[2].parameters(), "lr": 0.01}]
    model, optimizer = run.prepare(given, torch.optim.SGD(groups, lr=0.1))
    for number in range(2):
        inputs = torch.ones(4, 3)
        if number == 1 and change == "moved":
            optimizer.param_groups[1]["params"].append(given[0].weight)
        if number == 1 and change == "removed":
            optimizer.param_groups.pop()
        if number == 1 and change == "converted":
            given.bfloat16()
            inputs = inputs.bfloat16()
        try:
            if number == 1 and change == "added":
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            if number == 1 and change == "given back":
                optimizer.load_state_dict(optimizer.state_dict())
            run.backward(model(inputs).square().mean())
            if number == 1 and change == "assigned":
                run.unscale_gradients()
                given[0].weight.grad = torch.ones_like(given[0].weight)
            optimizer.step()
        except AccelError as error:
            return str(error)
        optimizer.zero_grad()
    return None


@pytest.mark.parametrize(
    ("stage", "change", "said"),
    [
        (1, "moved", "DeepSpeed: the parameters of the optimizer's groups were changed"),
        (2, "moved", "DeepSpeed: the parameters of the optimizer's groups were changed"),
        (3, "moved", "DeepSpeed: the parameters of the optimizer's groups were changed"),
        *((stage, "added", "DeepSpeed: add_param_group: its engine steps") for stage in (1, 2, 3)),
        (1, "removed", "DeepSpeed: the parameters of the optimizer's groups were changed"),
        (2, "removed", "DeepSpeed: the parameters of the optimizer's groups were changed"),
        (3, "removed", "DeepSpeed: the parameters of the optimizer's groups were changed"),
        (1, "given back", "DeepSpeed: load_state_dict of an optimizer whose state each rank has a share of"),
        (2, "given back", "DeepSpeed: load_state_dict of an optimizer whose state each rank has a share of"),
        (3, "given back", "DeepSpeed: load_state_dict of an optimizer whose state each rank has a share of"),
        (1, "assigned", "DeepSpeed: 1 parameter(s) have a gradient that its engine does not see"),
        (2, "assigned", "DeepSpeed: 1 parameter(s) have a gradient that its engine does not see"),
        (3, "assigned", "DeepSpeed: 1 parameter(s) have a gradient that its engine does not see"),
        (2, "converted", "DeepSpeed: a weight of shape [5, 3] was converted from torch.float32"),
        (3, "converted", "DeepSpeed: a weight of shape [5, 3] was converted from torch.float32"),
    ],
)
def test_what_the_engine_would_not_follow_is_refused(
    stage: int, change: str, said: str, run_processes
) -> None:
    """It went on with what it had copied, or failed by an error of its own."""
    for found in run_processes(changed, stage, change):
        assert str(found).startswith(said)
