"""Experiment trackers of ten libraries: plugins of accel-core.

Importing this package imports neither torch, nor a library, nor its own modules (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from accel_trackers.libraries.aim import Aim
    from accel_trackers.libraries.clearml import ClearML
    from accel_trackers.libraries.comet import Comet
    from accel_trackers.libraries.dvclive import DVCLive
    from accel_trackers.libraries.mlflow import MLflow
    from accel_trackers.libraries.neptune import Neptune
    from accel_trackers.libraries.swanlab import SwanLab
    from accel_trackers.libraries.trackio import Trackio
    from accel_trackers.libraries.wandb import Wandb
    from accel_trackers.options import (
        AimConfig,
        ClearMLConfig,
        CometConfig,
        DVCLiveConfig,
        MLflowConfig,
        NeptuneConfig,
        SwanLabConfig,
        TrackioConfig,
        WandbConfig,
    )
    from accel_trackers.tensorboard import TensorBoardTracker
    from accel_trackers.tracker import LibraryTracker

__all__ = [
    "Aim",
    "AimConfig",
    "ClearML",
    "ClearMLConfig",
    "Comet",
    "CometConfig",
    "DVCLive",
    "DVCLiveConfig",
    "LibraryTracker",
    "MLflow",
    "MLflowConfig",
    "Neptune",
    "NeptuneConfig",
    "SwanLab",
    "SwanLabConfig",
    "TensorBoardTracker",
    "Trackio",
    "TrackioConfig",
    "Wandb",
    "WandbConfig",
]
__version__ = "0.1.0"

_MODULES: Final = {"LibraryTracker": "tracker", "TensorBoardTracker": "tensorboard"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_trackers' has no attribute {name!r}", name=name)
    module = "options" if name.endswith("Config") else f"libraries.{name.lower()}"
    return getattr(import_module(f"accel_trackers.{_MODULES.get(name, module)}"), name)
