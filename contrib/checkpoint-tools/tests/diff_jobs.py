"""One small training, saved by several stacks."""

from __future__ import annotations

import torch
from torch import nn

from accel_core import Accelerator, ProjectConfiguration, set_seed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = nn.functional.dropout(layer(hidden), 0.1, self.training).relu()
        return self.head(hidden)


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens), (tokens + 1) % 12), None


def train(project, strategy, resume=None, done=0, plugins=()):
    """Train three steps, from the start or from a checkpoint of `done`; save `stepN` after each."""
    accelerator, *prepared = _prepared(project, strategy, plugins)
    model, optimizer, scheduler, data = prepared
    if resume:
        accelerator.load_state(resume)
    for step, tokens in enumerate(data, done + 1):
        accelerator.forward_backward(model, tokens.chunk(2), loss_of, microbatches=2)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.save_state(f"{project}/step{step}", step=step)
        if step == 3:
            break
    accelerator.end_training()


def save_again(source, target, strategy):
    """Load a checkpoint into another stack or world, and save it at once."""
    accelerator, *_ = _prepared(None, strategy)
    accelerator.load_state(source)
    accelerator.save_state(target)
    accelerator.end_training()


def _prepared(project, strategy, plugins=()):
    accelerator = Accelerator(
        strategy=strategy,
        plugins=plugins,
        project_config=ProjectConfiguration(project_dir=project),
    )
    set_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = torch.utils.data.DataLoader(torch.arange(64) % 12, batch_size=4, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, data)
