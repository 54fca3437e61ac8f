"""The options of each tracker: sections `wandb`, `mlflow`, ... of accel.yaml."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from accel_core import option

__all__ = [
    "AimConfig",
    "ClearMLConfig",
    "CometConfig",
    "DVCLiveConfig",
    "MLflowConfig",
    "NeptuneConfig",
    "SwanLabConfig",
    "TrackerConfig",
    "TrackioConfig",
    "WandbConfig",
]


@frozen(kw_only=True)
class TrackerConfig:
    """The options that all trackers of this package have."""

    library: ClassVar[str]
    """Path of the class that knows the library."""
    name: ClassVar[str]
    """The tracker's name, as on its card."""

    project: str | None = option(None, help="Project; default: that of `init_trackers`.")
    run_name: str | None = option(None, help="What people call the run; default: the library's choice.")
    tags: tuple[str, ...] = option((), help="Tags of the run.")
    offline: bool = option(False, help="Write local files, and never use the network.")
    directory: str | None = option(None, help="Folder of local files; default: the run's logging_dir.")


@frozen(kw_only=True)
class AimConfig(TrackerConfig):
    """Options of Aim; `directory` may be an address, `aim://HOST:PORT`."""

    library = "accel_trackers.libraries.aim:Aim"
    name = "aim"


@frozen(kw_only=True)
class ClearMLConfig(TrackerConfig):
    """Options of ClearML; `directory` is used offline only."""

    library = "accel_trackers.libraries.clearml:ClearML"
    name = "clearml"


@frozen(kw_only=True)
class CometConfig(TrackerConfig):
    """Options of Comet; `directory` is used offline only."""

    library = "accel_trackers.libraries.comet:Comet"
    name = "comet"


@frozen(kw_only=True)
class DVCLiveConfig(TrackerConfig):
    """Options of DVCLive; `offline` leaves DVC's experiment and Studio alone."""

    library = "accel_trackers.libraries.dvclive:DVCLive"
    name = "dvclive"


@frozen(kw_only=True)
class MLflowConfig(TrackerConfig):
    """Options of MLflow; `offline` or `directory` selects a database in a folder."""

    library = "accel_trackers.libraries.mlflow:MLflow"
    name = "mlflow"


@frozen(kw_only=True)
class NeptuneConfig(TrackerConfig):
    """Options of Neptune 2.x; `directory` holds what is not sent yet."""

    library = "accel_trackers.libraries.neptune:Neptune"
    name = "neptune"


@frozen(kw_only=True)
class SwanLabConfig(TrackerConfig):
    """Options of SwanLab."""

    library = "accel_trackers.libraries.swanlab:SwanLab"
    name = "swanlab"


@frozen(kw_only=True)
class TrackioConfig(TrackerConfig):
    """Options of Trackio; `offline` refuses a Space or a server."""

    library = "accel_trackers.libraries.trackio:Trackio"
    name = "trackio"


@frozen(kw_only=True)
class WandbConfig(TrackerConfig):
    """Options of Weights & Biases."""

    library = "accel_trackers.libraries.wandb:Wandb"
    name = "wandb"
