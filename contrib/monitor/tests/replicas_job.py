"""What test_monitor_replicas does in processes of its own. Returns plain values, which the test compares."""

from __future__ import annotations

import torch
from torch import nn

from accel_core import Accelerator, AccelError, LocalSGD
from accel_monitor import ReplicasConfig


def train(what: str, steps: int = 6, every: int = 2, strategy: str = "ddp") -> list[str]:
    """What each step raises ("" for nothing), where rank 1 changes something after the third step."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, strategy=strategy, plugins=[ReplicasConfig(every=every)])
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
    rank, said = accelerator.process_index, []
    torch.manual_seed(rank)
    for number in range(1, steps + 1):
        accelerator.backward(model(torch.randn(4, 8)).square().sum())
        said.append(_said(optimizer.step))
        optimizer.zero_grad()
        if number == 3 and rank == 1:
            _change(what, module, optimizer.optimizer)
    accelerator.end_training()
    return said


def _change(what: str, module: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        if what == "weight":
            weight = module[0].weight  # FSDP's parameters are DTensors
            getattr(weight, "to_local", lambda: weight)().view(-1)[3] += 1
        elif what == "all":
            for parameter in module.parameters():
                parameter.add_(1)
                optimizer.state[parameter]["exp_avg"].add_(1)
        elif what == "moment":
            optimizer.state[module[2].bias]["exp_avg"][5] += 1
        elif what == "buffer":
            module[1].running_mean.fill_(7)


def _said(action) -> str:
    try:
        action()
    except AccelError as error:
        return str(error)
    return ""


def train_alone(local_steps: int) -> list[str]:
    """What steps of LocalSGD raise, two of them, and one after it."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, plugins=[ReplicasConfig(every=1)])
    module = nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
    torch.manual_seed(accelerator.process_index)
    said = []

    def step() -> None:
        accelerator.backward(model(torch.randn(4, 8)).square().sum())
        said.append(_said(optimizer.step))
        optimizer.zero_grad()

    with LocalSGD(accelerator, model, local_steps) as local:
        for _ in range(2):
            step()
            local.step()
    step()
    accelerator.end_training()
    return said


def on_a_device() -> bool:
    """Whether a device's sums of a tensor's bytes are those of the host, in any memory order."""
    from accel_testing.simulated.device import simulate

    simulate("sim")
    from accel_monitor.replicas import checksum, sums

    here = [torch.arange(35.0).view(5, 7).t(), torch.ones(3, dtype=torch.uint8), torch.empty(0)]
    there = [each.to("sim") for each in here]
    of_device = [each.item() for each in sums(there)]
    return of_device == [each.item() for each in sums(here)] and checksum(there) == checksum(there[:2])
