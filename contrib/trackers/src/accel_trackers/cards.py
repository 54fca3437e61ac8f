"""The cards of the trackers, which accel-core reads before all else."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from accel_core import Card

__all__ = [
    "AIM",
    "CLEARML",
    "COMET",
    "DVCLIVE",
    "MLFLOW",
    "NEPTUNE",
    "SWANLAB",
    "TENSORBOARD",
    "TRACKIO",
    "WANDB",
]


def _missing(module: str, extra: str) -> str | None:
    """The reason why a tracker cannot be used: its library is not installed."""
    if find_spec(module) is None:
        return f"{module} is not installed; it comes with the extra accel-trackers[{extra}]"
    return None


def _card(name: str, module: str, config: str, summary: str) -> Card:
    return Card(
        name=name,
        slot="tracker",
        summary=summary,
        api_version="1.0",
        probe=partial(_missing, module, name),
        config=f"accel_trackers.options:{config}",
        implementation="accel_trackers.tracker:LibraryTracker",
    )


AIM = _card("aim", "aim", "AimConfig", "Aim, in a local repository.")
CLEARML = _card("clearml", "clearml", "ClearMLConfig", "ClearML, as a task.")
COMET = _card("comet", "comet_ml", "CometConfig", "Comet, as an experiment.")
DVCLIVE = _card("dvclive", "dvclive", "DVCLiveConfig", "DVCLive, in files that DVC reads.")
MLFLOW = _card("mlflow", "mlflow", "MLflowConfig", "MLflow, on a tracking server or in a local store.")
NEPTUNE = _card("neptune", "neptune", "NeptuneConfig", "Neptune 2.x.")
SWANLAB = _card("swanlab", "swanlab", "SwanLabConfig", "SwanLab.")
TENSORBOARD = Card(
    name="tensorboard",
    slot="tracker",
    summary="Event files that TensorBoard shows.",
    api_version="1.0",
    probe=partial(_missing, "tensorboard", "tensorboard"),
    implementation="accel_trackers.tensorboard:TensorBoardTracker",
)
TRACKIO = _card("trackio", "trackio", "TrackioConfig", "Trackio, in a local database or a Space.")
WANDB = _card("wandb", "wandb", "WandbConfig", "Weights & Biases.")
