"""Fifty steps on a grid, and the same in one process of plain torch. Runs in workers."""

from __future__ import annotations

import torch
from fsdp_problem import GPT, MLP, accelerator, batch, loss_of, optimizer_of, sized
from torch import nn
from torch.nn import functional as F

from accel_fsdp import TorchTensorParallelPlugin

STEPS, CLIP = 50, 0.5


class Conv(nn.Module):
    """Of even widths, so that its head can be split."""

    pp_split_points = ("norm",)

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 5, 3), nn.Conv2d(5, 8, 3, bias=False)
        self.norm = nn.GroupNorm(1, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        hidden = F.relu(self.norm(self.second(F.relu(self.first(x)))))
        return self.head(hidden.mean((2, 3)))


class Gpt(GPT):
    """Of as many blocks as an interleaved pipeline has stages."""

    def __init__(self):
        super().__init__(blocks=4)


MODELS = {"mlp": MLP, "conv": Conv, "gpt": Gpt}
BLOCKS = {"mlp": ["Block"], "conv": ["Conv2d"], "gpt": ["Attending"]}
PLANS = {
    "mlp": {"*.up": "colwise", "*.down": "rowwise"},
    "conv": {"head": "rowwise_rep"},
    "gpt": {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"},
}


def made(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
    return model, optimizer_of(model)


def data(kind, step):
    return batch(kind, step)


def plain(kind):
    """(losses, norms, weights)."""
    model, optimizer = made(kind)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model, *data(kind, step))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: each.detach() for name, each in model.named_parameters()}


def trained(kind, options, split):
    """The same on a grid."""
    given = sized(transformer_cls_names_to_wrap=BLOCKS[kind], **options)
    if split:
        given.append(TorchTensorParallelPlugin(tp_size=2, parallelize_plan=PLANS[kind]))
    run = accelerator(*given)
    model, optimizer = run.prepare(*made(kind))
    reader, readers = run.run.topology.reader, run.run.topology.readers
    losses, norms = [], []
    for step in range(STEPS):
        mine = [each[reader::readers] for each in data(kind, step)]
        found = run.forward_backward(
            model, [mine], lambda model, batch: (loss_of(model, *batch), None), microbatches=1
        )
        norms.append(run.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.reduce(found.loss, "mean").item())
    weights = {name: each.clone() for name, each in run.iter_weights(model)}
    run.end_training()
    return losses, norms, weights
