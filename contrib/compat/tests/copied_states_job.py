"""What each rank does that saves states which are copied, and then goes on from the copy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from accel_compat import install

install()

from accelerate import Accelerator  # noqa: E402  # once its name is ours
from accelerate.utils import ProjectConfiguration  # noqa: E402


class SharedMemory(LocalFileSystem):
    """The store memory: of several processes, which is a folder."""

    protocol = "memory"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        if path.startswith("memory://"):
            path = str(Path(os.environ["COPIED_STATES"], path.removeprefix("memory://")))
        return super()._strip_protocol(path)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.makedirs(self._parent(path), exist_ok=True)
        super().pipe_file(path, value, mode=mode, **options)


def made(folder: str) -> Accelerator:
    fsspec.register_implementation("memory", SharedMemory, clobber=True)
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    )
    accelerator.prepare(torch.nn.Linear(4, 4))
    return accelerator


def saved(folder: str) -> list[float]:
    """Save twice, and return the random numbers that follow."""
    accelerator = made(folder)
    torch.manual_seed(accelerator.process_index)
    for _ in range(2):
        torch.rand(3)
        accelerator.save_state()
    found: list[float] = torch.rand(3).tolist()
    accelerator.end_training()
    return found


def resumed(folder: str) -> tuple[list[float], int]:
    """Load the newest, and return the random numbers that follow and the next state's number."""
    accelerator = made(folder)
    accelerator.load_state()
    found: list[float] = torch.rand(3).tolist()
    number = accelerator.save_iteration
    accelerator.end_training()
    return found, number


def counted_on(folder: str) -> list[str]:
    """Save where another run has, load it, and return the folders."""
    accelerator = made(folder)
    written = [str(accelerator.save_state()) for _ in range(2)]
    accelerator.load_state()
    accelerator.end_training()
    return written
