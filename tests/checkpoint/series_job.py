"""What each rank of test_checkpoint_series does. Returns plain values, which the test compares."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from accel_core import Accelerator, ProjectConfiguration


class Job:
    """A prepared run whose only parameter is the number that was last saved or loaded."""

    def __init__(self, folder: str | Path, **options: object) -> None:
        options.setdefault("automatic_checkpoint_naming", True)
        config = ProjectConfiguration(project_dir=str(folder), **options)
        self.accelerator = Accelerator(device="cpu", project_config=config)
        self.module = nn.Linear(1, 1, bias=False)
        self.accelerator.prepare(self.module)

    def save(self, value: float, where: Path | None = None) -> Path:
        with torch.no_grad():
            self.module.weight.fill_(value)
        return self.accelerator.save_state(where)

    def load(self, where: Path | None = None, **options: object) -> float:
        with torch.no_grad():
            self.module.weight.fill_(-1)
        loaded = self.accelerator.load_state(where, **options)
        self.loaded = loaded and loaded.directory
        return self.module.weight.item()


def save_and_load(folder: str, saves: int, limit: int | None) -> tuple[list[str], float, int]:
    """The folders after some saves, what is loaded then, and the next number."""
    job = Job(folder, total_limit=limit)
    for value in range(saves):
        job.save(value)
    job.accelerator.wait_for_everyone()
    left = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
    found = left, job.load(), job.accelerator.save_iteration
    job.accelerator.end_training()
    return found
