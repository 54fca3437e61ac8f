"""State of models that were never sharded, as in somebody's file; and gradients that are cleared by hand."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from fsdp_problem import MLP, TIMEOUT, sized
from torch import Tensor, nn

from accel_core import Accelerator, ConfigError

HSDP = {"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 2}
Made = tuple[Accelerator, nn.Module, Any]


def made(model: nn.Module, optimizer: Any = torch.optim.AdamW, **options: Any) -> Made:
    run = Accelerator(device="cpu", strategy="fsdp", plugins=[TIMEOUT, *sized(**options)])
    return (run, *run.prepare(model, optimizer(model.parameters(), lr=0.01)))


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MLP()


def step(model: nn.Module, optimizer: Any, backward: Any) -> None:
    backward(model(torch.ones(2, 6)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and optimizer of plain torch, after two steps."""
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer, Tensor.backward)
    return model, optimizer


def warm(options: dict[str, Any]) -> float:
    """The largest difference to plain torch, a step after a run took over its state."""
    run, model, optimizer = made(net(1), **options)
    of_file, adam = plain()
    run.unwrap_model(model).load_state_dict(of_file.state_dict())
    optimizer.load_state_dict(deepcopy(adam.state_dict()))  # torch's would share it
    step(model, optimizer, run.backward)
    step(of_file, adam, Tensor.backward)
    found = run.get_state_dict(model, rank0_only=False)
    run.end_training()
    return max((found[name] - each).abs().max().item() for name, each in of_file.state_dict().items())


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {}),
        (2, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100}),
        pytest.param(3, {"activation_checkpointing": True}, marks=pytest.mark.full),
        pytest.param(2, {"state_dict_type": "FULL_STATE_DICT"}, marks=pytest.mark.full),
        pytest.param(4, HSDP, marks=pytest.mark.full),
    ],
)
def test_plain_weights_and_a_plain_optimizers_state_are_cut_as_they_are_loaded(
    world: int, options: dict[str, Any], run_processes
) -> None:
    for difference in run_processes(warm, options, world=world):
        assert difference < 1e-6


def own(folder: str) -> float:
    """Its own state comes back, too: whole tensors are not expected there."""
    run, model, optimizer = made(net(1))
    step(model, optimizer, run.backward)
    weights, state = model.state_dict(), optimizer.state_dict()
    before = {name: tensor.clone() for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    step(model, optimizer, run.backward)
    after = run.get_state_dict(model, rank0_only=False)
    run.end_training()
    return min((after[name] - before[name]).abs().max().item() for name in before)


def test_its_own_sharded_state_is_taken_as_before(tmp_path, run_processes) -> None:
    assert all(change > 0 for change in run_processes(own, str(tmp_path)))


def of_another_shape() -> str:
    run, model, _ = made(net(1))
    state = {**net(0).state_dict(), "0.weight": torch.ones(3, 6)}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    finally:
        run.end_training()
    return ""


@pytest.mark.full
def test_a_weight_of_another_shape_is_torchs_own_error(run_processes) -> None:
    for told in run_processes(of_another_shape):
        assert "size mismatch for 0.weight" in told


# -- Muon ------------------------------------------------------------------------------------------


def muon(rows: int) -> str:
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, rows, bias=False))
    try:
        run, model, optimizer = made(model, torch.optim.Muon)
    except ConfigError as error:
        return str(error)
    step(model, optimizer, run.backward)
    run.end_training()
    return ""


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
@pytest.mark.parametrize(
    ("rows", "world"), [(1, 1), (1, 2), (2, 2), pytest.param(2, 3, marks=pytest.mark.full)]
)
def test_muon_of_a_matrix_with_fewer_rows_than_ranks_is_refused_at_prepare(
    rows: int, world: int, run_processes
) -> None:
    for told in run_processes(muon, rows, world=world):
        if rows >= world:
            assert not told
            continue
        assert (
            f"Muon cannot add to the rows of 1.weight [{rows}, 4], which are sharded over {world} ranks"
            in told
        )
        assert "such as AdamW" in told.splitlines()[-1]


# -- gradients that are cleared by hand ------------------------------------------------------------


class Outer(torch.optim.SGD):
    """An optimizer that clears gradients in its own step, as SAM does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.zero_grad()


def cleared(how: str, folder: str) -> tuple[str, str]:
    """What a save says after gradients were cleared, and inside `no_sync`, where they are kept elsewhere."""
    run, model, optimizer = made(net(1), Outer)
    run.backward(model(torch.ones(2, 6)).square().mean())
    if how == "by hand":
        for parameter in model.parameters():
            parameter.grad = None
    else:
        optimizer.optimizer.step()
    run.save_state(folder)
    with run.no_sync(model):
        run.backward(model(torch.ones(2, 6)).square().mean())
    try:
        run.save_state(folder)
    except Exception as error:
        return "saved", str(error)
    finally:
        optimizer.zero_grad()
        run.end_training()
    return "saved", ""


@pytest.mark.parametrize("how", ["by hand", "by the optimizer"])
@pytest.mark.by_default("by hand")
def test_a_save_after_gradients_were_cleared_by_hand(how: str, tmp_path, run_processes) -> None:
    for saved, told in run_processes(cleared, how, str(tmp_path / "saved")):
        assert saved == "saved"
        assert "gradients that no optimizer has applied" in told
