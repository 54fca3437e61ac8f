"""Runs with checkpoints on a local disk and copies in a store, as functions for processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import stored_job as job
import torch

from accel_core import Accelerator, CheckpointError, InitProcessGroupKwargs, ProjectConfiguration
from accel_core.checkpoint import copies, votes

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def tiered(folder: str, store: str, **options: Any) -> tuple[Accelerator, Any, Any]:
    if options.get("save_on_each_node"):
        folder = on_its_node(folder)
    named = {"automatic_checkpoint_naming": True, "record_every": 0, **options}
    return job.made(project_config=ProjectConfiguration(project_dir=folder, store=store, **named))


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
    accelerator, model, optimizer = tiered(folder, store, **options)
    accelerator.load_state(missing_ok=True)
    weights = []
    for _ in range(saves):
        job.step(accelerator, model, optimizer)
        weights.append(job.weight(accelerator, model))
        accelerator.save_state(wait=not background)
        if not background:
            accelerator.wait_for_checkpoint()  # so that tests know what has been copied when
    accelerator.end_training()
    return weights


def resumed(
    folder: str, store: str, options: Mapping[str, Any] = NO_OPTIONS, best: bool = False
) -> tuple[str, torch.Tensor]:
    """Return the place and the weight that a restart goes on from."""
    accelerator, model, _ = tiered(folder, store, **options)
    place = str(accelerator.load_state(best=best))
    found = job.weight(accelerator, model)
    accelerator.end_training()
    return place, found


def loaded_from_path(folder: str, store: str, number: int) -> torch.Tensor:
    """Load a local path while the store does not answer, then wait for all ranks."""
    accelerator, model, _ = tiered(folder, store)
    accelerator.print("ready")
    os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    accelerator.load_state(f"{folder}/checkpoints/checkpoint_{number}")
    accelerator.wait_for_everyone()
    found = job.weight(accelerator, model)
    accelerator.end_training()
    return found


def tried(folder: str, store: str, saves: int) -> str:
    """Save, and return the text of the error that the end raises, or nothing."""
    accelerator, model, optimizer = tiered(folder, store)
    for _ in range(saves):
        job.step(accelerator, model, optimizer)
        accelerator.save_state()
    try:
        accelerator.end_training()
    except CheckpointError as error:
        return str(error)
    return ""


def restarted(endpoint: str, folder: str, store: str) -> None:
    """Tell the test rank 0's number, then go on from the newest checkpoint."""
    if os.environ.get("RANK", "0") == "0":
        tell(endpoint)
    resumed(folder, store)


def tell(endpoint: str) -> None:
    import boto3

    boto3.client("s3", endpoint_url=endpoint).put_object(
        Bucket="bucket", Key="pid", Body=str(os.getpid()).encode()
    )


def preempted(folder: str, store: str) -> torch.Tensor:
    """Be told to stop after the second save, and return the weight that is saved then."""
    accelerator, model, optimizer = tiered(folder, store, store_every=9)
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
    tell(endpoint)
    trained(folder, store, 1)


def saved_while_rank_0_hangs(folder: str, store: str) -> list[str]:
    """Save again when a copy of which rank 0 alone gets no answer has gone on for a while; train on."""
    votes.TIMEOUTS = 3  # type: ignore[misc]
    quick = [InitProcessGroupKwargs(timeout=timedelta(seconds=2))]
    named = {"automatic_checkpoint_naming": True, "record_every": 0}
    project = ProjectConfiguration(project_dir=folder, store=store, **named)
    accelerator, model, optimizer = job.made(project_config=project, kwargs_handlers=quick)
    if accelerator.is_main_process:
        copies.CopyTarget._begin = lambda self: time.sleep(120)  # type: ignore[method-assign, assignment]
    accelerator.save_state()
    copied_until = time.monotonic() + 6.5
    while time.monotonic() < copied_until + accelerator.process_index / 5:
        time.sleep(0.1)
    accelerator.save_state()
    job.step(accelerator, model, optimizer)
    accelerator.wait_for_everyone()
    accelerator.load_state()
    accelerator.wait_for_everyone()
    saved = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
    with suppress(CheckpointError):
        accelerator.end_training()
    return saved
