"""A small run with all that a record may hold, for processes of their own."""

from __future__ import annotations

import os
import signal
import time
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, ProfileKwargs, get_logger
from accel_monitor import MonitorConfig, hangs, pace, sampling

STEPS = 30


def train(folder, die_at=None, resume=False, lr=0.1, slow=0.0):
    """Train on what looks like digits, log each loss, save at step 10; return the losses by step."""
    sampling.CLOSE, pace.PUBLISH_SECONDS, hangs.LOOK_SECONDS = 0.0, 0.0, 0.02
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, project_dir=folder, plugins=[MonitorConfig(every=1)])
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    images, labels = torch.rand(800, 64), torch.randint(10, (800,))
    loader = DataLoader(TensorDataset(images, labels), 8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("digits", {"lr": lr, "api_key": "sk-secret"})
    done, losses = 0, {}
    if resume:
        accelerator.load_state(folder / "saved")
        done = 10
    windows = accelerator.windows(loader, model, items=lambda batch: len(batch[0]))
    for window in islice(windows, STEPS - done):
        for inputs, classes in window:
            loss = nn.functional.cross_entropy(model(inputs), classes, reduction="sum")
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        done += 1
        losses[done] = loss.item() / len(inputs)
        accelerator.log({"loss": losses[done]}, step=done)
        time.sleep(slow)
        if done == 10:
            accelerator.save_state(folder / "saved")
            get_logger("digits").warning("ten are done")
            with accelerator.profile(ProfileKwargs(output_trace_dir=str(folder / "traces"))):
                torch.ones(2) + 1
        if done == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    accelerator.end_training()
    return losses
