"""An extension sees gradients before DistributedDataParallel reduces them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_problem import accelerator
from torch import nn

from accel_core import GradScalerKwargs
from accel_ddp import DistributedDataParallelKwargs
from accel_testing.simulated import write_distribution

WATCHER = """
from accel_core import Card, hooks, implements

class Watcher:
    def __init__(self, config, run):
        self.seen = {}

    @implements(hooks.transform_gradient)
    def transform_gradient(self, unit, gradient, name):
        self.seen.setdefault(name, []).append(gradient.clone())
        return gradient * 10

CARD = Card(name="watcher", slot="extension", summary="A toy.", api_version="1.0",
            implementation="toy_watcher:Watcher")
"""


def watched() -> dict[str, Any]:
    run = accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reduced = []
    for micro_batch in range(2):
        with run.accumulate(model):
            x = torch.full((1, 1), float(1 + run.process_index + 2 * micro_batch))
            run.backward(model(x).sum())
            (weight,) = run.unwrap_model(model).parameters()
            reduced.append(weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    (seen,) = run.run.plugins["watcher"].seen.values()
    run.end_training()
    return {"seen": [gradient.item() for gradient in seen], "reduced": reduced}


def test_it_sees_and_changes_each_ranks_own_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_processes
) -> None:
    (tmp_path / "toy_watcher.py").write_text(WATCHER)
    write_distribution(tmp_path, "accel-watcher", "[accel_core.extension]\nwatcher = toy_watcher:CARD\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = run_processes(watched, environment={"ACCEL__EXTENSIONS": "watcher"})
    # Rank r has inputs 1 + r and 3 + r, halved by the window of two.
    assert [each["seen"] for each in found] == [[0.5, 1.5], [1.0, 2.0]]
    assert [each["reduced"] for each in found] == [[5.0, 25.0], [10.0, 25.0]]


def groups() -> list[int]:
    run = accelerator()
    found = []
    for dim in ("world", "control"):
        group = run.run.collectives(dim).group
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        found.append(int(total))
    run.end_training()
    return found


def test_collectives_have_torchs_process_group(run_processes) -> None:
    assert run_processes(groups) == [[2, 2], [2, 2]]


def adversarial(views: bool, window: int) -> list[float]:
    """A critic's weights under fp16 after steps of both, where the generator's loss gives gradients to it."""
    run = accelerator(
        DistributedDataParallelKwargs(gradient_as_bucket_view=views),
        GradScalerKwargs(init_scale=64.0),
        mixed_precision="fp16",
        gradient_accumulation_steps=window,
    )
    torch.manual_seed(0)
    pairs = [
        (each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (nn.Linear(2, 2), nn.Linear(2, 1))
    ]
    (made, makes), (critic, judges) = (run.prepare(*pair) for pair in pairs)
    x = torch.ones(2, 2) * (run.process_index + 1)
    for _ in range(3):
        for _ in range(window):
            with run.accumulate(critic):
                judges.zero_grad()
                run.backward(critic(made(x).detach()).mean())
                run.clip_grad_norm_(critic.parameters(), 1.0)
                judges.step()
        for _ in range(window):
            with run.accumulate(made):
                makes.zero_grad()
                run.backward(-critic(made(x)).mean())
                makes.step()
    return [*run.unwrap_model(critic).weight.detach().flatten().tolist()]


@pytest.mark.parametrize("window", [1, 2])
def test_a_gan_trains_in_fp16_where_gradients_are_views_of_buckets(window: int, run_processes) -> None:
    """The reducer gives a parameter the tensor again that zero_grad has dropped."""
    assert run_processes(adversarial, True, window) == run_processes(adversarial, False, window)
