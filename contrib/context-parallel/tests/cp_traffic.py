"""Windows of three micro-batches whose sequences two ranks share: by hand, and by an Accelerator."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from cp_problem import LENGTH, Gpt, accelerator_of, loss_of, samples
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accel_testing import Traffic

WINDOW, STEPS = 3, 3
CLIP = 0.5
gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
attend = F.scaled_dot_product_attention


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def windows(loader):
    """The micro-batches of each step."""
    batches = iter(loader)
    for _ in range(STEPS):
        yield list(itertools.islice(batches, WINDOW))


def share(rank):
    """Where the tokens of a rank stand: a piece of the sequence's head, and the matching one of its tail."""
    piece = LENGTH // 4
    pieces = torch.arange(LENGTH).split(piece)
    return torch.cat((pieces[rank], pieces[3 - rank]))


def by_hand(strategy):
    """Gather keys and values, as torch's own context parallelism has no kernel for a CPU."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    mine, model = share(mesh.get_local_rank()), Gpt()
    mask = mine[:, None] >= torch.cat((share(0), share(1)))

    def attention(query, key, value, is_causal):
        keys, values = (gather(each.contiguous(), 2, mesh) for each in (key, value))
        return attend(query, keys, values, mask)

    if strategy == "ddp":
        model = DistributedDataParallel(model)
    else:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    optimizer = optimizer_of(model)

    def train(batches):
        total = 0.0
        for number, batch in enumerate(batches):
            last = number + 1 == WINDOW
            if strategy == "fsdp":
                model.set_requires_gradient_sync(last)
            parts = {name: tensor[:, mine] for name, tensor in batch.items()}
            parts["position_ids"] = mine.expand_as(parts["input_ids"])
            with model.no_sync() if strategy == "ddp" and not last else nullcontext():
                F.scaled_dot_product_attention = attention
                loss = loss_of(model, parts)[0] / WINDOW
                loss.backward()
                F.scaled_dot_product_attention = attend
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return measured(train, windows(DataLoader(samples(), 2)))


def by_accelerator(strategy):
    run = accelerator_of(strategy, size=2, gradient_accumulation_steps=WINDOW)
    model = Gpt()
    model, optimizer, loader = run.prepare(model, optimizer_of(model), DataLoader(samples(), 2))

    def train(batches):
        total = 0.0
        for batch in batches:
            with run.accumulate(model, batch=batch):
                loss = loss_of(model, batch)[0]
                run.backward(loss)
                if run.sync_gradients:
                    run.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / WINDOW
        return total

    found = measured(train, windows(loader))
    run.end_training()
    return found


def measured(train, steps):
    """The losses, and what the last step sends."""
    losses = []
    for batches in steps:
        with Traffic() as seen:
            losses.append(train(batches))
    return losses, seen.kinds()


def both(strategies):
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    found = {name: (by_hand(name), by_accelerator(name)) for name in strategies}
    dist.destroy_process_group()
    return found
