"""Small training problems, each with its plain PyTorch loop: the judge of every parity test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from accel_core import Accelerator, AccelError

BATCH = 8
FEATURES = 6


def net(seed: int = 0, width: int = 16) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1))


def batches(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        x = torch.randn(BATCH, FEATURES, generator=generator)
        made.append((x, x.sum(dim=1, keepdim=True).sin()))
    return made


def plain_losses(
    count: int,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    schedule: bool = False,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
    dtype: torch.dtype | None = None,
) -> list[float]:
    """The losses of an ordinary loop; with `dtype` under autocast, with a scaler for float16."""
    model = net()
    opt = optimizer(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50) if schedule else None
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    data = batches(count)
    for number, (x, y) in enumerate(data, 1):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            prediction = model(x)
        loss = F.mse_loss(prediction.float(), y)
        scaler.scale(loss / accumulate).backward()
        losses.append(loss.item())
        if number % accumulate == 0 or number == len(data):
            if clip is not None:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(opt)
            scaler.update()
            if scheduler is not None:
                scheduler.step()
            opt.zero_grad()
    return losses


def our_losses(
    accelerator: Any,
    count: int,
    *,
    clip: float | None = None,
    schedule: bool = False,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
) -> list[float]:
    """The same loop with our few lines."""
    model = net()
    opt = optimizer(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50) if schedule else None
    loader = torch.utils.data.DataLoader(batches(count), batch_size=None)
    model, opt, scheduler, loader = accelerator.prepare(model, opt, scheduler, loader)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            losses.append(loss.item())
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            if scheduler is not None:
                scheduler.step()
            opt.zero_grad()
    return losses


def repeated(values: list[Any]) -> Iterator[Any]:
    while True:
        yield from values


def prepare_in_parts() -> str:
    """What `prepare` says of a model that torch's `fully_shard` has sharded."""
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(cpu=True, strategy="ddp")
    model = fully_shard(net())
    try:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except AccelError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return "nothing"
