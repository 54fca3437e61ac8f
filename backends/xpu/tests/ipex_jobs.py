"""What the processes of the tests do with ipex, and the problem they train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from accel_core import Accelerator
from accel_xpu import IpexConfig

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.conv(x).transpose(1, 2))
        return self.head(hidden[:, -1])


def made(optimizer: str) -> tuple[Net, Any, Any]:
    torch.manual_seed(0)
    model = Net()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    return model, chosen, StepLR(chosen, 1, 0.9)


def batches(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, 10, generator=generator) for _ in range(count)]


def plain(name: str, *, bf16: bool = False) -> list[float]:
    model, optimizer, scheduler = made(name)
    losses = []
    for x in batches():
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(x)
        loss = output.float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def steps(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, inputs: Any) -> list[float]:
    losses = []
    for x in inputs:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours(name: str, config: IpexConfig | None = None, **arguments: Any) -> tuple[list[float], bool, str]:
    """Losses, whether the step is fused, and the class that the LSTM has become."""
    accelerator = Accelerator(device="cpu", plugins=[config or IpexConfig()], **arguments)
    model, optimizer, _ = parts = made(name)
    losses = steps(accelerator, *accelerator.prepare(*parts), batches())
    accelerator.end_training()
    return losses, bool(getattr(optimizer, "fused", False)), type(model.lstm).__module__


def bf16(name: str) -> tuple[list[float], bool, str]:
    return ours(name, mixed_precision="bf16")


def several() -> tuple[list[bool], list[bool]]:
    """Of two optimizers of one model: whether each is fused, and holds the model's parameters of now."""
    accelerator = Accelerator(device="cpu", plugins=[IpexConfig(optimize_lstm=True)])
    torch.manual_seed(0)
    model = Net()
    head = torch.optim.SGD([*model.lstm.parameters(), *model.head.parameters()], 0.1)
    optimizers = [torch.optim.SGD(model.conv.parameters(), 0.1), head]
    prepared, *_ = accelerator.prepare(model, *optimizers)
    now = {id(parameter) for parameter in prepared.parameters()}
    held = [all(id(p) in now for group in each.param_groups for p in group["params"]) for each in optimizers]
    accelerator.end_training()
    return [bool(getattr(each, "fused", False)) for each in optimizers], held


def hooked() -> int:
    """How often a hook that the user put on the optimizer was called in five steps."""
    accelerator = Accelerator(device="cpu", plugins=[IpexConfig()])
    model, optimizer, scheduler = made("SGD")
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    steps(accelerator, *accelerator.prepare(model, optimizer, scheduler), batches())
    accelerator.end_training()
    return len(calls)


def saved(folder: str) -> list[float]:
    """Losses after a save by a run with ipex."""
    accelerator = Accelerator(device="cpu", plugins=[IpexConfig(optimize_lstm=True)])
    prepared = accelerator.prepare(*made("Adam"))
    steps(accelerator, *prepared, batches()[:2])
    accelerator.save_state(folder)
    found = steps(accelerator, *prepared, batches()[2:])
    accelerator.end_training()
    return found


def resumed_without(folder: str) -> list[float]:
    accelerator = Accelerator(device="cpu")
    prepared = accelerator.prepare(*made("Adam"))
    accelerator.load_state(folder)
    found = steps(accelerator, *prepared, batches()[2:])
    accelerator.end_training()
    return found
