"""Local SGD as one writes it in plain torch: the judge. Runs in workers."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from accel_core import Accelerator, InitProcessGroupKwargs, LocalSGD
from accel_testing.patience import patience

TIMEOUT = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(20)))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(count, rank):
    generator = torch.Generator().manual_seed(100 + rank)
    inputs = [torch.randn(8, 4, generator=generator) for _ in range(count)]
    return [(x, x.sum(dim=1, keepdim=True).sin()) for x in inputs]


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def plainly(every, steps, accumulate):
    """(weights after each step, at the end)."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience(20)))
    model, path = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def mean():
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()

    taken = 0
    for number, (x, y) in enumerate(batches(steps * accumulate, dist.get_rank()), 1):
        (F.mse_loss(model(x), y) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
            if taken % every == 0:
                mean()
            path.append(flat(model))
    if taken % every:
        mean()
    dist.destroy_process_group()
    return path, flat(model)


class Counted:
    """torch.distributed.all_reduce, counted; torch's own reducer is counted by its communication hook."""

    def __init__(self):
        self.sums, self.buckets, self.real = 0, 0, dist.all_reduce

    def __call__(self, *args, **kwargs):
        self.sums += 1
        return self.real(*args, **kwargs)

    def bucket(self, group, bucket):
        self.buckets += 1
        return dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(group, bucket)


def ours(every, steps, accumulate, enabled=True, strategy=None):
    """(weights after each step, at the end, gradients reduced, averages taken)."""
    accelerator = Accelerator(
        cpu=True, strategy=strategy, gradient_accumulation_steps=accumulate, kwargs_handlers=[TIMEOUT]
    )
    model, path, counted = net(), [], Counted()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if hasattr(model, "register_comm_hook"):
        model.register_comm_hook(None, counted.bucket)
    dist.all_reduce = counted
    with LocalSGD(accelerator, model, every, enabled) as local:
        for x, y in batches(steps * accumulate, accelerator.process_index):
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            if accelerator.sync_gradients:
                path.append(flat(model))
    result = path, flat(model), counted.buckets, counted.sums
    x, y = batches(1, accelerator.process_index)[0]
    accelerator.backward(F.mse_loss(model(x), y))
    optimizer.step()
    after = flat(model)
    accelerator.end_training()
    return *result, after


def with_optimizer(kind, strategy, folder=None):
    """(its state before the end, the mean of it by hand, its state afterwards; weights of shared steps)."""
    accelerator = Accelerator(cpu=True, strategy=strategy, kwargs_handlers=[TIMEOUT])
    model = net()
    optimizer = kind(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    given = batches(6, accelerator.process_index)

    def step(x, y):
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    def state():
        each = optimizer.state_dict()["state"].values()
        return [value.clone() for values in each for value in values.values() if torch.is_tensor(value)]

    with LocalSGD(accelerator, model, 3) as local:
        for x, y in given[:4]:
            step(x, y)
            local.step()
        apart = state()
    means = [value.double() for value in apart]
    for value in means:
        dist.all_reduce(value)
        value.div_(dist.get_world_size())
    kept = state()
    if folder is not None:
        accelerator.save_state(folder)
    for x, y in given[4:]:
        step(x, y)
    accelerator.end_training()
    return apart, means, kept, flat(model)
