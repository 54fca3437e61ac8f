"""Handwritten digits in plain PyTorch, on one device: what `digits.py` was before it met accel-core."""

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

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    seen, unseen = digits()
    train = DataLoader(seen, args.batch_size, shuffle=True)
    test = DataLoader(unseen, args.batch_size)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = ceil(len(train) / args.accumulate)  # of the optimizer in each epoch
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs * steps)
    torch.manual_seed(1)
    if args.resume:
        state = torch.load(f"{args.checkpoint}.pt")
        for part, saved in zip((model, optimizer, scheduler), state, strict=True):
            part.load_state_dict(saved)

    for epoch in range(scheduler.last_epoch // steps, args.epochs):
        model.train()
        for number, (images, labels) in enumerate(train, 1):
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            (loss / args.accumulate).backward()
            if number % args.accumulate == 0 or number == len(train):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right = 0
        with torch.no_grad():
            for images, labels in test:
                hits = model(images.to(device)).argmax(1) == labels.to(device)
                right += hits.sum().item()
        print(f"epoch {epoch + 1}: test accuracy {right / len(unseen):.1%}")
        state = [part.state_dict() for part in (model, optimizer, scheduler)]
        torch.save(state, f"{args.checkpoint}.pt")


if __name__ == "__main__":
    main()
