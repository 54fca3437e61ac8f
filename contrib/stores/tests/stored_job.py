"""A small training run with checkpoints in a store, as functions for processes of their own."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from accel_core import Accelerator, CheckpointError, ProjectConfiguration


def made(width: int = 64, **options: Any) -> tuple[Accelerator, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(width, 512)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model, optimizer


def numbered(url: str, **options: Any) -> tuple[Accelerator, Any, Any]:
    return made(project_config=project(url, **options))


def project(url: str, **options: Any) -> ProjectConfiguration:
    return ProjectConfiguration(project_dir=url, automatic_checkpoint_naming=True, **options)


def step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, model_width(accelerator, model))).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def model_width(accelerator: Accelerator, model: Any) -> int:
    width: int = accelerator.unwrap_model(model).in_features
    return width


def weight(accelerator: Accelerator, model: Any) -> torch.Tensor:
    found: torch.Tensor = accelerator.unwrap_model(model).weight.detach().clone()
    return found


def saved(
    url: str, steps: int, width: int = 64, background: bool = False, options: Any = None
) -> torch.Tensor:
    """Train, save, and return the weight."""
    accelerator, model, optimizer = made(width, **options or {})
    for _ in range(steps):
        step(accelerator, model, optimizer)
    accelerator.save_state(url, step=steps, wait=not background)
    found = weight(accelerator, model)
    accelerator.end_training()
    return found


def exported(url: str, options: Any) -> None:
    """Write weights, in two files."""
    accelerator, model, _ = made(**options)
    accelerator.save_model(model, url, max_shard_size=130_000)
    accelerator.end_training()


def saved_again(url: str, steps: int) -> torch.Tensor:
    """Load, train on, save under the same name, and return the weight."""
    accelerator, model, optimizer = made()
    accelerator.load_state(url)
    for _ in range(steps):
        step(accelerator, model, optimizer)
    accelerator.save_state(url)
    found = weight(accelerator, model)
    accelerator.end_training()
    return found


def loaded(url: str, width: int = 64) -> torch.Tensor:
    accelerator, model, _ = made(width)
    accelerator.load_state(url)
    found = weight(accelerator, model)
    accelerator.end_training()
    return found


def tried(url: str, steps: int) -> str:
    """Save, and return the error's text, or nothing."""
    try:
        saved(url, steps)
    except CheckpointError as error:
        return str(error)
    return ""


def endless(endpoint: str, url: str) -> None:
    """Say who this is, go on from the newest checkpoint, and save number after number until killed.

    All weights of checkpoint k are k.
    """
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint)
    client.put_object(Bucket="bucket", Key="pid", Body=str(os.getpid()).encode())
    accelerator, model, _ = numbered(url, total_limit=2)
    accelerator.load_state(missing_ok=True)
    while True:
        with torch.no_grad():
            accelerator.unwrap_model(model).weight.fill_(accelerator.save_iteration)
        accelerator.save_state(wait=False)


def series(url: str, losses: list[float]) -> None:
    """Go on from the newest, and save one checkpoint per loss, with weights of this number."""
    accelerator, model, _ = numbered(url, total_limit=1, keep_best="loss")
    accelerator.load_state(missing_ok=True)
    for number, loss in enumerate(losses):
        with torch.no_grad():
            accelerator.unwrap_model(model).weight.fill_(loss)
        accelerator.save_state(wait=bool(number % 2), metrics={"loss": loss})
    accelerator.end_training()


def loaded_of_series(url: str, best: bool) -> tuple[str, float]:
    """Return the place and the number in the weights of the newest or the best."""
    accelerator, model, _ = numbered(url, total_limit=1, keep_best="loss")
    place = str(accelerator.load_state(best=best))
    found = float(weight(accelerator, model)[0, 0])
    accelerator.end_training()
    return place, found
