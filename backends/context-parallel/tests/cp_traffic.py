"""Windows of three micro-batches whose sequences two ranks share: by hand, and by an Accelerator.

`benchmarks/parallel.py` times the two loops at a larger scale.
"""

from __future__ import annotations

import itertools
import traceback
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from cp_problem import LENGTH, PATIENCE, Gpt, accelerator_of, loss_of, samples
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from accel_core import TorchDynamoPlugin
from accel_testing import Traffic

WINDOW, STEPS = 3, 3
CLIP = 0.5
gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
attend = F.scaled_dot_product_attention


class Scale(NamedTuple):
    """How large the model and its sequences are, and if blocks are compiled."""

    length: int = LENGTH
    width: int = 16
    heads: int = 2
    compiled: bool = False


def gpt(scale):
    return Gpt(width=scale.width, heads=scale.heads, length=scale.length)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole_windows(scale):
    return samples(scale.length)[: 10 * WINDOW]


def endless(loader):
    while True:
        yield from loader


def share(rank, length):
    """Where the tokens of a rank stand: a piece of the sequence's head, and the matching one of its tail."""
    pieces = torch.arange(length).split(length // 4)
    return torch.cat((pieces[rank], pieces[3 - rank]))


def by_hand(strategy, scale):
    """Return the function that trains a window.

    It gathers keys and values, as torch's own context parallelism has no kernel for a CPU.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    mine, model = share(mesh.get_local_rank(), scale.length), gpt(scale)
    mask = mine[:, None] >= torch.cat([share(rank, scale.length) for rank in range(2)])
    batches = endless(DataLoader(whole_windows(scale), 2))
    for block in model.blocks if scale.compiled else ():
        block.compile()

    def attention(query, key, value, is_causal):
        keys, values = (gather(each.contiguous(), 2, mesh) for each in (key, value))
        return attend(query, keys, values, mask)

    if strategy == "ddp":
        model = DistributedDataParallel(model)
    else:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    optimizer = optimizer_of(model)

    def train():
        total = 0.0
        for number, batch in enumerate(itertools.islice(batches, WINDOW)):
            last = number + 1 == WINDOW
            if strategy == "fsdp":
                model.set_requires_gradient_sync(last)
            parts = {name: tensor[:, mine] for name, tensor in batch.items()}
            parts["position_ids"] = mine.expand_as(parts["input_ids"])
            with model.no_sync() if strategy == "ddp" and not last else nullcontext():
                before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, attention
                loss = loss_of(model, parts)[0] / WINDOW
                loss.backward()
                F.scaled_dot_product_attention = before
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return train


def by_accelerator(strategy, scale):
    """Return the function that trains a window, and the one that ends the run."""
    compiling = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    more = {"dynamo_plugin": compiling} if scale.compiled else {}
    run = accelerator_of(strategy, size=2, timeout=PATIENCE, gradient_accumulation_steps=WINDOW, **more)
    model, loader = gpt(scale), DataLoader(whole_windows(scale), 2)
    model, optimizer, loader = run.prepare(model, optimizer_of(model), loader)
    batches = endless(loader)

    def train():
        total = 0.0
        for batch in itertools.islice(batches, WINDOW):
            with run.accumulate(model, batch=batch):
                loss = loss_of(model, batch)[0]
                run.backward(loss)
                if run.sync_gradients:
                    run.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / WINDOW
        return total

    return train, run.end_training


def measured(train):
    """The losses, and what the last step sends."""
    losses = []
    for _ in range(STEPS):
        with Traffic() as seen:
            losses.append(train())
    return losses, seen.kinds()


class Comparisons(TorchDispatchMode):
    """Counts elementwise comparisons, of which causal masks are made."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.ge
        return func(*args, **(kwargs or {}))


def masks():
    """How many causal masks two windows of three micro-batches and two layers make."""
    dist.init_process_group("gloo", timeout=PATIENCE)
    train, end = by_accelerator("ddp", Scale())
    with Comparisons() as seen:
        train()
        train()
    end()
    dist.destroy_process_group()
    return seen.count


def both(strategies):
    dist.init_process_group("gloo", timeout=PATIENCE)
    found, scale = {}, Scale()
    for name in strategies:
        train, end = by_accelerator(name, scale)
        found[name] = measured(by_hand(name, scale)), measured(train)
        end()
    dist.destroy_process_group()
    return found


class Reads(TorchDispatchMode):
    """Collects the files in which the host reads a number: on an accelerator, it would wait for each."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            stack = [f"{each.filename}:{each.lineno}" for each in traceback.extract_stack()]
            self.places.append([each for each in stack if "/torch/" not in each][-6:])
        return func(*args, **(kwargs or {}))


def in_a_microbatch():
    """Return (collectives, reads) of the second window, whose layers are split too.

    The caller's variables say how layers are split.
    """
    run = accelerator_of("fsdp", size=2)
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(samples(), 4))
    batches = iter(loader)
    for _ in range(2):
        with Traffic() as seen, Reads() as reads:
            batch = next(batches)
            with run.accumulate(model, batch=batch):
                run.backward(loss_of(model, batch)[0])
    run.end_training()
    return seen.calls, reads.places
