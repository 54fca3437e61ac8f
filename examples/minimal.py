"""The shortest training loop: any device, any number of processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
inputs = torch.randn(512, 8)
data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, data = accelerator.prepare(model, optimizer, data)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=4 * len(data))
scheduler = accelerator.prepare(scheduler)

for epoch in range(4):
    for x, y in data:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    loss = accelerator.reduce(loss.detach(), "mean")  # over the processes: each has batches of its own
    accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
