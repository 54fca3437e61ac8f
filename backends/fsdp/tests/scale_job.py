"""What one rank of a large world would hold: torch's fake process group, and models without storage."""

from __future__ import annotations

import time
from math import ceil
from types import SimpleNamespace as PlainNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_core import Mesh, World, arrange
from accel_fsdp import FullyShardedDataParallelPlugin
from accel_fsdp.sharding.dims import declared
from accel_fsdp.sharding.fsdp2 import Sharded

SHAPES = {"7B": (4096, 11008, 32, 32), "70B": (8192, 28672, 80, 8)}
"""width, inner width, layers, heads of keys and values (of 128)"""
VOCABULARY = 32_000


class Block(nn.Module):
    def __init__(self, width, inner, heads):
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        side = heads * 128
        self.k, self.v = nn.Linear(width, side, bias=False), nn.Linear(width, side, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        width, inner, layers, heads = SHAPES[shape]
        self.tokens, self.norm = nn.Embedding(VOCABULARY, width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(Block(width, inner, heads) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)


class SimpleNamespace(PlainNamespace):
    """With weak references and a hash, by which strategies keep a run and its units."""

    __hash__ = object.__hash__


class Unfilled(Sharded):
    """Gives nothing storage."""

    def materialize(self, group):
        return None


def held(shape, world, rank=0, **options):
    """Bytes that this rank holds, those it should, weights of the whole model, groups, seconds to wrap."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"], **options)
    here = World(rank=rank, size=world, local_size=min(world, 8))
    dims = arrange(declared(plugin, {}, here), world)
    sizes = tuple(dim.size for dim in dims)
    mesh = Mesh(dims, rank, init_device_mesh("cpu", sizes, mesh_dim_names=tuple(dim.name for dim in dims)))
    run = SimpleNamespace(
        world=here,
        device=torch.device("cpu"),
        mesh=mesh,
        config=SimpleNamespace(mixed_precision="no", parallelism={}),
    )
    with torch.device("meta"):
        model = Model(shape)
    shapes = [parameter.shape for parameter in model.parameters()]
    started = time.perf_counter()
    strategy = Unfilled(plugin, run)
    unit = SimpleNamespace(mesh=mesh, name="unit0", set_forward_is_collective=lambda: None)
    strategy.wrap_model(unit, model)
    seconds = time.perf_counter() - started
    found = 0
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        found += parameter.to_local().numel() * 4
    ranks = mesh.size("dp_shard")
    index = mesh.index("dp_shard")
    due = sum(4 * rows(shape[0], ranks, index) * shape[1:].numel() for shape in shapes)
    dist.destroy_process_group()
    weights = sum(shape.numel() for shape in shapes)
    return {
        "found": found,
        "due": due,
        "weights": weights,
        "groups": SHAPES[shape][2] + 1,
        "seconds": seconds,
    }


def rows(total, ranks, index):
    """Of a dimension cut as torch cuts it: equal chunks, the last ones shorter or empty."""
    chunk = ceil(total / ranks)
    return max(0, min(chunk, total - index * chunk))
