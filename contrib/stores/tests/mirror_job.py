"""Runs with checkpoints on a local disk and copies in a store, as functions for processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import stored_job as job
import torch

from accel_core import Accelerator, CheckpointError, ProjectConfiguration
from accel_stores import MirrorConfig

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def mirrored(
    folder: str, store: str | None, every: int = 1, keep: int | None = None, **options: Any
) -> tuple[Accelerator, Any, Any]:
    if options.get("save_on_each_node"):
        folder = on_its_node(folder)
    named = {"automatic_checkpoint_naming": True, **options}
    return job.made(
        project_config=ProjectConfiguration(project_dir=folder, **named),
        plugins=[MirrorConfig(url=store, every=every, keep=keep)],
    )


def on_its_node(folder: str) -> str:
    """Make this rank the only one of its node, in the node's folder; return the project's folder."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"GROUP_RANK": os.environ["RANK"], "GROUP_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    here = Path(folder, f"node{os.environ['RANK']}")
    here.mkdir(exist_ok=True)
    os.chdir(here)
    return "."


def trained(
    folder: str, store: str, saves: int, options: Mapping[str, Any] = NO_OPTIONS, background: bool = False
) -> list[torch.Tensor]:
    """Go on from the newest checkpoint, save after each step, and return the weight of each save."""
    accelerator, model, optimizer = mirrored(folder, store, **options)
    accelerator.load_state(missing_ok=True)
    weights = []
    for _ in range(saves):
        job.step(accelerator, model, optimizer)
        weights.append(job.weight(accelerator, model))
        accelerator.save_state(wait=not background)
    accelerator.end_training()
    return weights


def resumed(project: str) -> tuple[str, torch.Tensor]:
    """Return the place and the weight that a run with this project goes on from."""
    accelerator, model, _ = job.numbered(project)
    place = str(accelerator.load_state())
    found = job.weight(accelerator, model)
    accelerator.end_training()
    return place, found


def tried(folder: str, store: str, saves: int) -> str:
    """Save, and return the text of the error that the end raises, or nothing."""
    accelerator, model, optimizer = mirrored(folder, store)
    for _ in range(saves):
        job.step(accelerator, model, optimizer)
        accelerator.save_state()
    try:
        accelerator.end_training()
    except CheckpointError as error:
        return str(error)
    return ""


def preempted(folder: str, store: str) -> torch.Tensor:
    """Be told to stop after the second save, and return the weight that is saved then."""
    accelerator, model, optimizer = mirrored(folder, store, every=9)
    assert not accelerator.save_on_preemption()
    for _ in range(2):
        accelerator.save_state()
        job.step(accelerator, model, optimizer)
    if accelerator.is_main_process:
        os.kill(os.getpid(), signal.SIGTERM)
    while not accelerator.save_on_preemption():
        time.sleep(0.1)
    accelerator.end_training()
    return job.weight(accelerator, model)


def killed_in_a_copy(endpoint: str, folder: str, store: str) -> None:
    """Tell the test this process's number, then save one checkpoint and copy it."""
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint)
    client.put_object(Bucket="bucket", Key="pid", Body=str(os.getpid()).encode())
    trained(folder, store, 1)
