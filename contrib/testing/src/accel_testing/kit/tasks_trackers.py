"""The checks of level 1 of a tracker, in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel_testing.kit.tasks import make

__all__ = ["configured", "logged", "not_started", "resumed"]


def not_started(folder: str, arguments: Mapping[str, Any]) -> None:
    """Make and end a run without `init_trackers`, as on all ranks but one."""
    make({**arguments, "project_dir": folder}).end_training()


def configured(folder: str, arguments: Mapping[str, Any]) -> bool:
    """Start with what scripts pass as settings: vars(args), nested configs, paths."""
    accelerator = make({**arguments, "project_dir": folder})
    config = {
        "lr": 0.1,
        "resume": None,
        "hidden": [64, 32],
        "optimizer": {"name": "adam", "betas": (0.9, 0.999), 3: True},
        "data": Path("data"),
        "dtype": torch.bfloat16,
    }
    before = copy.deepcopy(config)
    accelerator.init_trackers("configured", config)
    accelerator.end_training()
    return config == before


def logged(folder: str, arguments: Mapping[str, Any]) -> bool:
    """Log what scripts log; whether there is something to unwrap."""
    accelerator = make({**arguments, "project_dir": folder})
    accelerator.init_trackers("logged")
    accelerator.log({"loss": 0.5, "tokens": 3, "best": True, "note": "text"}, step=0)
    accelerator.log({"loss": torch.tensor(0.5, device=accelerator.device), "scale": float("inf")}, step=1)
    accelerator.log({"evaluation": {"f1": {"macro": float("nan")}, "skipped": None}}, step=1)
    accelerator.log({"without a step": 1})
    found = accelerator.get_tracker(arguments["log_with"], unwrap=True) is not None
    accelerator.end_training()
    return found


def resumed(folder: str, arguments: Mapping[str, Any]) -> None:
    """Log, save, and log on in a run that loads it, trackers started before the load."""
    for step in range(2):
        accelerator = make({**arguments, "project_dir": folder})
        accelerator.init_trackers("resumed")
        if step:
            accelerator.load_state(Path(folder, "checkpoint"))
        accelerator.log({"loss": 0.5}, step=step)
        accelerator.save_state(Path(folder, "checkpoint"))
        accelerator.end_training()
