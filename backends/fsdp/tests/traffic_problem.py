"""A small language model, split by torch's public API and by an Accelerator, and what a step sends.

`benchmarks/parallel.py` times the two loops at a larger scale.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from accel_core import Accelerator, InitProcessGroupKwargs, ParallelismConfig, TorchDynamoPlugin
from accel_fsdp import FullyShardedDataParallelPlugin, TorchTensorParallelPlugin
from accel_testing import Traffic
from accel_testing.patience import patience

WINDOW = 3
"""Micro-batches of a step."""
CLIP = 0.5
LEARNING_RATE = 1e-2
PATIENCE = timedelta(seconds=patience(40))


class Scale(NamedTuple):
    """How large the model and its batches are, and if blocks are compiled."""

    vocabulary: int = 18
    length: int = 8
    width: int = 16
    heads: int = 4
    rows: int = 4
    compiled: bool = False


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head = width // heads
        self.norm = nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        normed = self.norm(x)
        mixed = [each(normed) for each in (self.queries, self.keys, self.values)]
        heads = [each.unflatten(-1, (-1, self.head)).transpose(1, 2) for each in mixed]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(scale.vocabulary, scale.width)
        self.blocks = nn.ModuleList(Block(scale.width, scale.heads) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(scale.width), nn.Linear(scale.width, scale.vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    **dict.fromkeys(("queries", "keys", "values", "up"), "colwise"),
    **dict.fromkeys(("out", "down"), "rowwise"),
}


def window(step, reader, readers, scale):
    """This reader's rows of each micro-batch."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(scale.vocabulary, (WINDOW, scale.rows, scale.length + 1), generator=generator)
    return [(each[:, :-1], each[:, 1:]) for each in ids[:, reader::readers]]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


# -- by hand: torch's public API alone -------------------------------------------------------------


def by_hand(sizes, scale):
    """Return the function that trains a window, of a mesh with these sizes."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    samples = [name for name in sizes if name.startswith("dp")]
    shared = mesh[tuple(samples)] if samples else None
    model = Gpt(scale)
    for block in model.blocks if scale.compiled else ():
        block.compile()
    if "pp" in sizes:
        return pipeline_by_hand(model, mesh, shared, scale)
    if "tp" in sizes:
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        for block in model.blocks:
            plan = {name: styles[style]() for name, style in PLAN.items()}
            parallelize_module(block, mesh["tp"], plan, src_data_rank=None)
    if shared is not None:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=shared)
    optimizer = optimizer_of(model)
    readers = shared.size() if shared is not None else 1
    reader = dist.get_rank() // sizes.get("tp", 1)

    def train(step):
        losses = []
        for number, (ids, targets) in enumerate(window(step, reader, readers, scale)):
            if shared is not None:
                model.set_requires_gradient_sync(number + 1 == WINDOW)
            loss = loss_of(model(ids), targets) / WINDOW
            loss.backward()
            losses.append(loss.detach())
        clip_by_hand(model)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return train


def pipeline_by_hand(model, mesh, shared, scale):
    """Half of the model on each of two ranks."""
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    pieces = ((model.tokens, *model.blocks[:2]), (*model.blocks[2:], model.norm, model.head))
    stage = nn.Sequential(*pieces[rank])
    readers, reader = 1, 0
    if shared is not None:
        readers, reader = shared.size(), shared.get_local_rank()
        for part in (*(part for part in stage if isinstance(part, Block)), stage):
            fully_shard(part, mesh=shared, reshard_after_forward=False)
    optimizer = optimizer_of(stage)
    piped = PipelineStage(stage, rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(piped, WINDOW, loss_fn=loss_of)

    def train(step):
        batches = window(step, reader, readers, scale)
        losses = []
        if rank == 0:
            schedule.step(torch.cat([ids for ids, _ in batches]))
        else:
            schedule.step(target=torch.cat([targets for _, targets in batches]), losses=losses)
        clip_by_hand(stage, group)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return train


@torch.no_grad()
def clip_by_hand(model, stages=None):
    """Clip by the norm of all gradients: the squares of parts are summed over each dimension of the mesh."""
    sums = {}
    for parameter in model.parameters():
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        groups = ()
        if isinstance(gradient, DTensor):
            places = enumerate(gradient.placements)
            groups = tuple(
                gradient.device_mesh.get_group(dim) for dim, place in places if not place.is_replicate()
            )
        sums[groups] = sums.get(groups, 0) + local.square().sum()
    for group in {group: None for groups in sums for group in groups}:
        mine = [groups for groups in sums if group in groups]
        together = torch.stack([sums[groups] for groups in mine])
        dist.all_reduce(together, group=group)
        sums.update(zip(mine, together.unbind(), strict=True))
    total = torch.stack(list(sums.values())).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    scale = (CLIP / (total.sqrt() + 1e-6)).clamp(max=1)
    for parameter in model.parameters():
        parameter.grad.mul_(scale)


# -- by an Accelerator ------------------------------------------------------------------------------


def by_accelerator(sizes, scale):
    """Return the function that trains a window, and the one that ends the run."""
    given = [
        InitProcessGroupKwargs(timeout=PATIENCE),
        FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"]),
        ParallelismConfig(**sizes),
    ]
    if "tp" in sizes:
        plan = {f"blocks.*.{name}": style for name, style in PLAN.items()}
        given.append(TorchTensorParallelPlugin(parallelize_plan=plan))
    if scale.compiled:
        given.append(TorchDynamoPlugin(backend="inductor", use_regional_compilation=True))
    run = Accelerator(cpu=True, plugins=given, gradient_accumulation_steps=1 if "pp" in sizes else WINDOW)
    model = Gpt(scale)
    model, optimizer = run.prepare(model, optimizer_of(model))
    reader, readers = run.run.topology.reader, run.run.topology.readers

    def train(step):
        batches = window(step, reader, readers, scale)
        if "pp" in sizes:
            found = run.forward_backward(model, batches, staged_loss, microbatches=WINDOW)
            loss = found.loss
            run.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            return loss
        losses = []
        for ids, targets in batches:
            with run.accumulate(model):
                loss = loss_of(model(ids), targets)
                run.backward(loss)
                if run.sync_gradients:
                    run.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach() / WINDOW)
        return torch.stack(losses).sum()

    return train, run.end_training


def staged_loss(model, batch):
    ids, targets = batch
    return loss_of(model(ids), targets), None


# -- both -------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    losses: list[float | None]
    traffic: dict[str, tuple[int, int]]


def traffic(cases):
    """Of each case: by hand and by an Accelerator, the losses, and what a step sends after two others."""
    dist.init_process_group("gloo", timeout=PATIENCE)
    found, scale = {}, Scale()
    for name, sizes in cases.items():
        train, end = by_accelerator(sizes, scale)
        found[name] = measured(by_hand(sizes, scale)), measured(train)
        end()
    dist.destroy_process_group()
    return found


def measured(train):
    losses = [train(step) for step in range(2)]
    with Traffic() as seen:
        losses.append(train(2))
    return Measured([None if loss is None else loss.item() for loss in losses], seen.kinds())
