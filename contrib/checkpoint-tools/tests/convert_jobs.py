"""One small training, run under Accelerate, plain torch and accel-core, in processes of their own."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.hidden = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.dropout(self.hidden(self.norm(self.embedding(tokens)))))


class Average:
    def __init__(self, seed):
        self.values = {"mean": torch.full((3,), float(seed)), "count": seed, "shape": (1, 2)}

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = values


class Plain:
    """What a loop without a library has in place of an Accelerator."""

    def prepare(self, *objects):
        return objects if len(objects) > 1 else objects[0]

    def backward(self, loss):
        loss.backward()

    def register_for_checkpointing(self, *objects):
        pass

    def end_training(self):
        pass


class Job:
    """Made anew with a `seed` of its own, so that what is equal later has been loaded."""

    def __init__(self, accelerator, seed, *, two=False, groups=True):
        torch.manual_seed(seed)
        self.accelerator = accelerator
        self.modules = [Net(), nn.Linear(4, 4)] if two else [Net()]
        net = self.modules[0]
        matrices = [parameter for parameter in net.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in net.parameters() if parameter.ndim < 2]
        several = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "lr": 0.02 + seed}]
        self.optimizers = [torch.optim.AdamW(several if groups else net.parameters(), lr=0.01)]
        if two:
            self.optimizers.append(torch.optim.SGD(self.modules[1].parameters(), lr=0.1 + seed, momentum=0.9))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizers[0], [2, 4, 5], gamma=0.5)
        self.average = Average(seed)
        prepared = [accelerator.prepare(*each) for each in zip(self.modules, self.optimizers, strict=True)]
        self.models, self.steppers = zip(*prepared, strict=True)
        self.scheduler = accelerator.prepare(scheduler)
        accelerator.register_for_checkpointing(self.average)

    def train(self, steps):
        """The losses, and what else there is to compare afterwards."""
        losses = []
        for step in range(steps):
            tokens = torch.arange(8) * (step + 3) % 11
            loss = nn.functional.cross_entropy(self.models[0](tokens), tokens)
            for model in self.models[1:]:
                loss = loss + model(torch.ones(2, 4)).square().mean()
            self.accelerator.backward(loss)
            for optimizer in self.steppers:
                optimizer.step()
                optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        average = {name: str(value) for name, value in self.average.values.items()}
        drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]  # noqa: NPY002  the stream
        return losses, average, drawn, self.scheduler.get_last_lr()


def do(job, folders, options):
    return globals()[job](*folders, **options)


def core():
    from accel_core import Accelerator

    return Accelerator(cpu=True)


def accelerate():
    warnings.simplefilter("ignore")  # its own
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def accelerate_saves(folder, *, two=False, safe=True):
    """Trains 3 steps, saves, trains 3 more; all `_saves` do."""
    job = Job(accelerate(), 0, two=two)
    job.train(3)
    job.accelerator.save_state(folder, safe_serialization=safe)
    return job.train(3)


def accelerate_loads(folder, *, two=False):
    job = Job(accelerate(), 1, two=two)
    job.accelerator.load_state(folder)
    return job.train(3)


def core_saves(folder, *, two=False, groups=True):
    job = Job(core(), 0, two=two, groups=groups)
    job.train(3)
    job.accelerator.save_state(folder, step=3)
    found = job.train(3)
    job.accelerator.end_training()
    return found


def core_is_fresh(folder, *, groups=True):
    """Saves what `--like` takes."""
    job = Job(core(), 1, groups=groups)
    job.accelerator.save_state(folder)
    job.accelerator.end_training()


def core_loads(folder):
    job = Job(core(), 1)
    job.accelerator.load_state(folder)
    found = job.train(3)
    job.accelerator.end_training()
    return found


def one_saves():
    """Return an Accelerator of which rank 0 alone saves."""
    from accel_core import Accelerator

    class OneSaves(Accelerator):
        def save_state(self, directory):
            if self.is_main_process:
                super().save_state(directory, alone=True)
            self.wait_for_everyone()
            return directory

    return OneSaves(cpu=True)


def core_imports(folder, into, *, two=False, alone=False):
    from accel_checkpoint_tools import load_accelerate

    job = Job(one_saves() if alone else core(), 1, two=two)
    left_out = load_accelerate(job.accelerator, folder, into)
    found = job.train(3)
    job.accelerator.end_training()
    return found, left_out, sorted(path.name for path in Path(into).parent.iterdir())


def core_imports_what_does_not_fit(folder, into):
    from accel_checkpoint_tools import load_accelerate
    from accel_core import CheckpointError

    job = Job(core(), 1)
    before = job.modules[0].hidden.weight.clone()
    try:
        load_accelerate(job.accelerator, folder, into)
    except CheckpointError as error:
        left = [path.name for path in Path(into).parent.iterdir()]
        return str(error), torch.equal(before, job.modules[0].hidden.weight), left
    return None


# -- torch.distributed.checkpoint ----------------------------------------------------------------


def torch_saves(folder, *, flat=False):
    """Gives the state that was saved, too."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    warnings.simplefilter("ignore")  # that nothing is distributed
    job = Job(Plain(), 0, groups=False)
    job.train(3)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(job.modules[0], job.optimizers[0], options=options)
    state = {"model": model, "optimizer": optimizer, "scheduler": job.scheduler.state_dict()}
    checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return job.train(3), _lists(*get_state_dict(job.modules[0], job.optimizers[0]))


def torch_loads(folder):
    """The state that torch finds there, by name."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    warnings.simplefilter("ignore")  # that nothing is distributed
    job = Job(Plain(), 1, groups=False)
    module, optimizer = job.modules[0], job.optimizers[0]
    state = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return _lists(*get_state_dict(module, optimizer)), optimizer.param_groups[0]["lr"]


def core_imports_dcp(folder, into):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from accel_checkpoint_tools import load_dcp

    job = Job(core(), 1, groups=False)
    left_out = load_dcp(job.accelerator, folder, into)
    job.accelerator.end_training()
    return left_out, _lists(*get_state_dict(job.modules[0], job.optimizers[0]))


def torch_state(folder):
    return torch_loads(folder)[0]


def shards_save(folder):
    """Each of two ranks holds a half of each tensor; gives the whole state."""
    import torch.distributed as dist
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.rand(4, 5)).sum().backward()
    optimizer.step()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(state, checkpoint_id=folder)
    found = _lists(*get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))
    dist.destroy_process_group()
    return found


def _lists(model, optimizer):
    """Our names of the tensors, and what is in them."""
    found = {f"model/{name}": tensor.tolist() for name, tensor in model.items() if name != "head.weight"}
    for name, values in optimizer["state"].items():
        found |= {f"optimizer/{name}/{key}": value.tolist() for key, value in values.items()}
    return found


class Twins:
    """Critics and their targets, all of one shape; one optimizer joins the first and third model."""

    def __init__(self, accelerator, seed):
        torch.manual_seed(seed)
        self.accelerator = accelerator
        self.nets = [nn.Linear(2, 2) for _ in range(4)]
        first, first_target, second, second_target = self.nets
        both = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.1)
        target = torch.optim.Adam(second_target.parameters(), lr=0.2)
        other = torch.optim.Adam(first_target.parameters(), lr=0.3)
        self.optimizers = [target, both, other]
        accelerator.prepare(*self.nets, *self.optimizers)

    def step(self):
        for number, net in enumerate(self.nets):
            net(torch.full((1, 2), float(number + 1))).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def values(self):
        weights = [net.weight.detach().flatten().tolist() for net in self.nets]
        moments = [
            each.state[each.param_groups[0]["params"][0]]["exp_avg"].flatten().tolist()
            for each in self.optimizers
        ]
        return weights, moments


def accelerate_saves_twins(folder):
    job = Twins(accelerate(), 0)
    job.step()
    job.accelerator.save_state(folder)
    return job.values()


def accelerate_loads_twins(folder):
    job = Twins(accelerate(), 1)
    job.accelerator.load_state(folder)
    return job.values()


def core_imports_twins(folder, into, out):
    from accel_checkpoint_tools import load_accelerate
    from accel_checkpoint_tools.accelerate import write
    from accel_checkpoint_tools.contents import Contents

    job = Twins(core(), 1)
    job.step()
    left_out = load_accelerate(job.accelerator, folder, into)
    found = job.values()
    job.accelerator.end_training()
    Path(out).mkdir()
    with Contents.open(into) as contents:
        write(contents, Path(out))
    return found, left_out


def save_with_accelerates_fsdp(folder, state_dict_type):
    """What Accelerate's own FSDP code writes of a model sharded over these ranks, trained for three steps."""
    from types import SimpleNamespace

    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    PartialState(cpu=True)  # it makes the process group
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(1)
    model = sharded_network()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(3):
        model(torch.arange(12.0).view(2, 6) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=state_dict_type, cpu_ram_efficient_loading=False
    )
    accelerator = SimpleNamespace(process_index=rank, num_processes=world, is_fsdp2=True)
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder)
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    parameters = [(name, each, optimizer.state[each]) for name, each in model.named_parameters()]
    found = {
        name: [each.full_tensor().tolist(), state["exp_avg"].full_tensor().tolist(), state["step"].item()]
        for name, each, state in parameters
    }
    torch.distributed.destroy_process_group()
    return found


def sharded_network():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
