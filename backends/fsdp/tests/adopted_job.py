"""What each rank of test_fsdp_adopted does: train a model that the program has sharded before `prepare`."""

from __future__ import annotations

import os

import grid_job
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from accel_core import Accelerator, AccelError

BATCH, WINDOW, CLIP, EPOCHS = 4, 2, 0.5, 2


def made():
    torch.manual_seed(0)
    return grid_job.Gpt(tied=False).double()


def data():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(grid_job.WORDS, (32, grid_job.LENGTH + 1), generator=generator)
    return torch.utils.data.TensorDataset(words[:, :-1], words[:, 1:])


class Adapted(nn.Module):
    """An adapter beside a sharded model, as peft adds them; `unused` is one that no forward calls."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        for each in base.parameters():
            each.requires_grad_(False)
        torch.manual_seed(2 + int(os.environ.get("RANK", "0")))  # each rank draws its own
        self.down, self.up = nn.Linear(grid_job.WORDS, 2).double(), nn.Linear(2, grid_job.WORDS).double()
        self.unused = nn.Linear(2, 2).double()

    def forward(self, words):
        logits = self.base(words)
        return logits + self.up(self.down(logits))


def by_hand(model, *, replicate=1, **options):
    """Shard a model as torch's tutorial of fully_shard does."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    if replicate > 1:
        mesh = init_device_mesh("cpu", (replicate, world // replicate), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model, optimizer, loader, accelerator=None, epochs=EPOCHS):
    """Losses of windows and norms, in plain torch or with an Accelerator."""
    losses, norms = [], []
    for _ in range(epochs):
        for number, (words, following) in enumerate(loader):
            loss = grid_job.loss_of(model, words, following)
            losses.append(loss.item())
            if accelerator is None:
                (loss / WINDOW).backward()
                if (number + 1) % WINDOW == 0:
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            losses[-1] = accelerator.reduce(loss.detach(), "mean").item()
            with accelerator.accumulate(model):
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
                optimizer.step()
                optimizer.zero_grad()
    return losses, norms


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-4)


def plain(*, adapted=False):
    """Losses, norms and weights of one process."""
    model = Adapted(made()) if adapted else made()
    losses, norms = train(model, optimizer_of(model), DataLoader(data(), BATCH))
    return losses, norms, {name: value.detach() for name, value in model.state_dict().items()}


def fail_in_backward(model):
    """A backward that ends in an error, as of memory that is out, after some gradients are there."""

    def fail(gradient):
        raise MemoryError

    handle = model.down.weight.register_hook(fail)
    try:
        grid_job.loss_of(model, *data()[:2]).backward()
    except MemoryError:
        model.zero_grad()
    handle.remove()


def adopted(environment, adapted=False, options=None, fails=False):
    """The same of a model that was sharded by hand."""
    os.environ.update(environment, ACCEL__GRADIENT_ACCUMULATION_STEPS=str(WINDOW))
    accelerator = Accelerator(cpu=True)
    model = by_hand(made(), **(options or {}))
    if adapted:
        model = Adapted(model)
    optimizer = optimizer_of(model)
    loader = DataLoader(data(), BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if fails:
        fail_in_backward(model)
    losses, norms = train(model, optimizer, loader, accelerator)
    weights = accelerator.get_state_dict(model, rank0_only=False)
    unused = model.unused.weight.grad if adapted else None
    sharded = sum(isinstance(module, FSDPModule) for module in model.modules())
    lines = accelerator.explain()
    accelerator.end_training()
    return losses, norms, weights, sharded, unused, lines


def half(environment, options, *, load=None, save=None):
    """Losses and norms of an epoch, of a model that was sharded by hand; without options, by nobody."""
    os.environ.update(environment, ACCEL__GRADIENT_ACCUMULATION_STEPS=str(WINDOW))
    accelerator = Accelerator(cpu=True)
    model = made() if options is None else by_hand(made(), **options)
    loader = DataLoader(data(), BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    if load:
        accelerator.load_state(load)
    found = train(model, optimizer, loader, accelerator, epochs=1)
    if save:
        accelerator.save_state(save)
    accelerator.end_training()
    return found


def begun(environment, options, folder):
    return half(environment, options, save=folder)


def resumed(environment, options, folder):
    return half(environment, options, load=folder)


def refused(environment, kind):
    """What `prepare` says of a model that the run cannot adopt."""
    os.environ.update(environment)
    accelerator = Accelerator(cpu=True)
    world = accelerator.num_processes
    if kind == "half of the ranks":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("other", "shard"))
        model = fully_shard(made(), mesh=mesh["shard"])
    elif kind == "meta":
        with torch.device("meta"):
            model = by_hand(made())
    else:
        model = by_hand(made())
    try:
        prepared = accelerator.prepare(model, optimizer_of(model))[0]
        if kind == "twice":
            accelerator.free_memory()
            accelerator.prepare(prepared)
    except AccelError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return "nothing"
