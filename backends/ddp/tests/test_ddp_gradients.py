"""What DistributedDataParallel leaves to torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp_problem import accelerator
from torch import nn

from accel_core import GradScalerKwargs
from accel_ddp import DistributedDataParallelKwargs


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
