"""Handwritten digits on any hardware: the loop of `digits_plain.py` and a few lines of accel-core."""

from __future__ import annotations

import argparse
from math import ceil
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, progress, set_seed


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to learn from and 360 to be tested on: (1, 8, 8), values from 0 to 1, ten classes."""
    pixels, digit = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, digit, test_size=360, stratify=digit, random_state=0)
    seen, unseen = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) for part in parts[:2])
    return TensorDataset(seen, torch.tensor(parts[2])), TensorDataset(unseen, torch.tensor(parts[3]))


def network() -> nn.Module:
    """Two convolutions and a linear layer, 20,000 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(512, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="of each process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of one optimizer step")
    parser.add_argument("--checkpoint", type=Path, default="digits-checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(0)  # the same weights on all processes
    seen, unseen = digits()
    train = DataLoader(seen, args.batch_size, shuffle=True)
    test = DataLoader(unseen, args.batch_size)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test, model, optimizer = accelerator.prepare(train, test, model, optimizer)
    steps = ceil(len(train) / args.accumulate)  # of the optimizer in each epoch
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs * steps)
    scheduler = accelerator.prepare(scheduler)
    set_seed(1, device_specific=True)  # other dropout on each process
    if args.resume:
        accelerator.load_state(args.checkpoint)

    for epoch in range(train.epoch, args.epochs):
        model.train()
        for images, labels in progress(train, f"epoch {epoch + 1}"):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right = 0
        with torch.no_grad():
            for images, labels in test:
                hits = model(images).argmax(1) == labels
                right += accelerator.gather_for_metrics(hits).sum().item()
        accelerator.print(f"epoch {epoch + 1}: test accuracy {right / len(unseen):.1%}")
        accelerator.save_state(args.checkpoint)
    accelerator.end_training()


if __name__ == "__main__":
    main()
