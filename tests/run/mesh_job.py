"""What each rank of test_mesh does, and the toy strategy: a mesh read from a variable."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import DataLoader

from accel_core import (
    Accelerator,
    ConfigError,
    DataLoaderConfiguration,
    MeshDim,
    hooks,
    implements,
    ops,
    set_seed,
)
from accel_core.contract.run import live

CARD = """
from accel_core import Card
CARD = Card(name="grid", slot="strategy", summary="A toy.", api_version="1.0",
            implementation="mesh_job:Grid")
"""


def dims(text):
    for each in filter(None, text.split(",")):
        name, size, *more = each.split()
        yield MeshDim(name, int(size), *(int(word) if word.isdecimal() else word for word in more))


class Grid:
    below: object

    def __init__(self, config, run):
        self.run, self.dims = run, list(dims(os.environ.pop("GRID", os.environ.get("OTHER", ""))))

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config, world):
        return self.dims

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit):
        group = self.run.collectives(self.run.topology.loss_dim)
        for parameter in unit.named_parameters().values():
            group.all_reduce(parameter.grad, "mean")


def described(mesh):
    if mesh is None:
        return None
    assert mesh.device_mesh.mesh_dim_names == mesh.names()
    assert [mesh.device_mesh.get_local_rank(name) for name in mesh.names()] == [
        mesh.index(name) for name in mesh.names()
    ]
    return tuple((dim.name, dim.size) for dim in mesh.dims)


def refused():
    with pytest.raises(ConfigError, match="tp 3 = 3"):
        Accelerator(cpu=True)
    return torch.distributed.is_initialized(), len(live())


def shape():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    assert accelerator.run.prepared.unit_of_model(model).mesh is accelerator.run.mesh
    found = described(accelerator.run.mesh)
    accelerator.end_training()
    return found


def groups():
    accelerator = Accelerator(cpu=True)
    run = accelerator.run
    names = {"odd": "odd", "gather": run.topology.gather_dim, "loss": run.topology.loss_dim}
    names |= {"all": "world", "alone": "alone"}
    found = {
        key: run.collectives(name).all_gather(torch.tensor([run.world.rank])).tolist()
        for key, name in names.items()
    }
    accelerator.end_training()
    return found


def gathered():
    """Ranks that `gather` and `gather_object` join: one of each reader, and every one."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    found = [ops.gather(torch.tensor([rank]), every_rank=every).tolist() for every in (False, True)]
    found += [ops.gather_object([rank], every_rank=every) for every in (False, True)]
    accelerator.end_training()
    return found


def unknown():
    Accelerator(cpu=True).run.collectives("tp")


def metrics():
    dispatch = os.environ["DISPATCH"] == "1"
    data = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=data)
    loader = accelerator.prepare(DataLoader(list(range(11)), batch_size=2))
    read, seen = [], []
    for batch in loader:
        read += batch.tolist()
        seen += accelerator.gather_for_metrics(batch).tolist()
    accelerator.end_training()
    return {"read": read, "seen": seen}


LENGTHS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


def items():
    """One step on the sum of 8 losses of LENGTHS items, divided by how the ranks share them."""
    accelerator = Accelerator(cpu=True)
    topology, mesh = accelerator.run.topology, accelerator.run.mesh
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(weight.weight)
    weight, optimizer = accelerator.prepare(weight, torch.optim.SGD(weight.parameters(), lr=1.0))
    mine = LENGTHS.chunk(topology.readers)[topology.reader]
    mine = mine.chunk(mesh.size("cp"))[mesh.index("cp")]
    for window in accelerator.windows([mine], weight, items=torch.sum):
        for part in window:
            accelerator.backward((weight(part[:, None]) * part[:, None]).sum())
            optimizer.step()
    accelerator.end_training()
    return weight.weight.item()


def plain_items():
    return (1 - (LENGTHS**2).sum() / LENGTHS.sum()).item()


def draws():
    accelerator = Accelerator(cpu=True)
    set_seed(3, device_specific=True)
    drawn = torch.rand(2).tolist()
    accelerator.end_training()
    return drawn


def beside():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1), strategy="other")
    found = described(accelerator.run.prepared.unit_of_model(model).mesh)
    accelerator.end_training()
    return found


def after_the_programs_own_end():
    """Whether this rank can communicate after a run whose groups the program has ended by itself."""
    names = os.environ["GRID"]
    first = Accelerator(cpu=True)
    torch.distributed.destroy_process_group()
    os.environ["GRID"] = names
    second = Accelerator(cpu=True)
    first.end_training()
    told = torch.ones(1)
    second.run.collectives("dp_replicate").all_reduce(told)
    second.run.collectives("odd").all_reduce(told)
    torch.distributed.destroy_process_group()
    second.end_training()
    return told.item()


def explained():
    accelerator = Accelerator(cpu=True)
    text = accelerator.explain()
    accelerator.end_training()
    return text
