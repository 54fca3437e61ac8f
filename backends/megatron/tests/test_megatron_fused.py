"""Steps counted by group, as transformer-engine and apex count them; what a load completes or refuses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import MODELS, accelerator, batches
from torch import nn

from accel_core import AccelError

pytestmark = pytest.mark.full


class FusedAdam(torch.optim.Optimizer):
    """A stand-in: AdamW's arithmetic, with the step in the group, once there is one."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = count = group.get("step", 0) + 1
            (one, two), rate = group["betas"], group["lr"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, gradient = self.state[parameter], parameter.grad
                for key in ("exp_avg", "exp_avg_sq") if not state else ():
                    state[key] = torch.zeros_like(parameter)
                parameter.mul_(1 - rate * group["weight_decay"])
                state["exp_avg"].lerp_(gradient, 1 - one)
                state["exp_avg_sq"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
                size = (state["exp_avg_sq"] / (1 - two**count)).sqrt_().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], size, value=-rate / (1 - one**count))


def fused() -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam = FusedAdam


def moved(way: str, folder: str, first: int, last: int) -> list[float]:
    """Weights after the steps `first` to `last` of one training."""
    ours = accelerator(**({"strategy": "single"} if way == "native" else OPTIONS[way.removeprefix("fused ")]))
    if way.startswith("fused"):
        fused()
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95)))
    if first:
        ours.load_state(f"{folder}/{first}")
    for step in range(first, last):
        ours.backward(model(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    ours.save_state(f"{folder}/{last}")
    return [
        float(number)
        for each in ours.get_state_dict(model, rank0_only=False).values()
        for number in each.flatten()
    ]


OPTIONS: dict[str, Any] = {"whole": {}, "shared": {"use_distributed_optimizer": True}}


@pytest.mark.parametrize("saver", ["native", "whole", "fused whole", "fused shared"])
@pytest.mark.parametrize("loader", ["native", "whole", "fused whole", "fused shared"])
def test_the_count_of_steps_goes_on(tmp_path: Path, saver: str, loader: str, run_processes) -> None:
    (wanted,) = run_processes(moved, "native", str(tmp_path / "native"), 0, 12, world=1)
    run_processes(moved, saver, str(tmp_path / saver), 0, 8, world=1)
    run_processes(moved, loader, str(tmp_path / saver), 8, 10, world=1)
    (found,) = run_processes(moved, saver, str(tmp_path / saver), 10, 12, world=1)
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def partly(folder: str, late: bool) -> tuple[str, bool, float]:
    """Natively one of the three weights that are one tensor here is stepped never, or later."""
    ours = accelerator(strategy="single")
    model = MODELS["llama"]()
    queries = model.model.layers[0].self_attn.q_proj.weight
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for steps, trained in ((2, False), (1, True))[: 2 if late else 1]:
        queries.requires_grad_(trained)
        for _ in range(steps):
            ours.backward(model(**batches(1)[0]).loss)
            optimizer.step()
            optimizer.zero_grad()
    queries.requires_grad_()
    ours.save_state(folder)
    ours.end_training()
    ours = accelerator()
    model = MODELS["llama"](seed=4)
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    before = {name: each.clone() for name, each in ours.get_state_dict(model, rank0_only=False).items()}
    said = Said()
    logging.getLogger().addHandler(said)
    try:
        ours.load_state(folder, strict=not late)
    except AccelError as error:
        said.lines.append(str(error))
    after = ours.get_state_dict(model, rank0_only=False)
    (unit,) = ours.run.units
    leaves = unit.hooks.optimizer_state(unit, unit.optimizers[0]).leaves
    moments = leaves.get("model.layers.0.self_attn.q_proj.weight/exp_avg")
    total = sum(float(part.abs().sum()) for _, part in moments.shards) if moments is not None else -1.0
    return "\n".join(said.lines), all(torch.equal(before[name], each) for name, each in after.items()), total


def test_a_weight_without_state_begins_with_no_moments_and_is_named(tmp_path: Path, run_processes) -> None:
    ((said, untouched, moments),) = run_processes(partly, str(tmp_path / "state"), False, world=1)
    assert "no optimizer state of model.layers.0.self_attn.q_proj.weight" in said
    assert (untouched, moments) == (False, 0.0)


def test_steps_that_differ_are_refused_before_anything_is_loaded(tmp_path: Path, run_processes) -> None:
    ((said, untouched, _),) = run_processes(partly, str(tmp_path / "state"), True, world=1)
    assert "step of model.layers.0.self_attn.q_proj.weight is 1, of" in said
    assert "they are stepped as one" in said
    assert untouched


def stepped_before() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.raises(AccelError, match="the SGD has state already, and megatron-core's optimizer"):
        accelerator().prepare(model, optimizer)


def test_an_optimizer_that_has_stepped_is_refused(run_processes) -> None:
    run_processes(stepped_before, world=1)
