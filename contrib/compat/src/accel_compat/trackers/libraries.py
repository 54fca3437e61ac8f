"""The trackers of eight libraries by Accelerate's names and arguments.

They use accel-trackers' classes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from accel_compat.environment.variables import str_to_bool
from accel_compat.notices import warn_once
from accel_compat.packages import load
from accel_compat.trackers.base import GeneralTracker, library_tracker


def _numbers(tracker: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among the values; that others have no place is said once."""
    for name, value in values.items():
        if not isinstance(value, (int, float)):
            warn_once(f"{tracker} cannot log {name!r} ({type(value).__qualname__}); skipped")
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


@library_tracker
class _Wrapping(GeneralTracker):
    """Hands everything to accel-trackers' class of the library."""

    requires_logging_directory: ClassVar[bool] = False
    library_class: ClassVar[str]
    """The name of that class."""

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.library = load(f"accel_trackers:{self.library_class}", f"the tracker of {self.library_class}")()
        self.run_name, self.init_kwargs = run_name, kwargs

    @property
    def tracker(self) -> Any:
        """The library's own object."""
        return self.library.handle

    def start(self) -> None:
        """Begin the run, with the tracker's run name as the project's name.

        Other arguments are the library's.
        """
        self.library.open(self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        """Store the run's settings."""
        return self.library.configure(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log whatever the library can hold."""
        self.library.log(values, step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        self.library.close()


def _held() -> Any:
    """The library's object for the run, as an attribute that a subclass may set."""

    def assign(tracker: Any, run: Any) -> None:
        tracker.library.handle = run

    return property(lambda tracker: tracker.library.handle, assign, doc="The library's own object.")


@library_tracker
class _WithImages(_Wrapping):
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images, by name."""
        self.library.log_images(values, step=step, **kwargs)


@library_tracker
class _WithTables(_WithImages):
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, of columns and rows or of a dataframe."""
        self.library.log_table(table_name, columns, data, dataframe, step, **kwargs)


@library_tracker
class WandBTracker(_WithTables):
    """Weights & Biases. Further arguments are `wandb.init`'s."""

    name, library_class = "wandb", "Wandb"
    main_process_only = False
    run = _held()


@library_tracker
class TrackioTracker(_Wrapping):
    """Trackio. Further arguments are `trackio.init`'s."""

    name, library_class = "trackio", "Trackio"
    main_process_only = False
    run = _held()


@library_tracker
class SwanLabTracker(_WithImages):
    """SwanLab. Further arguments are `swanlab.init`'s."""

    name, library_class = "swanlab", "SwanLab"
    main_process_only = False
    run = _held()


@library_tracker
class CometMLTracker(_Wrapping):
    """Comet. Further arguments are `comet_ml.start`'s."""

    name, library_class = "comet_ml", "Comet"
    writer = _held()


@library_tracker
class AimTracker(_Wrapping):
    """Aim, in the folder `logging_dir`. Further arguments are `aim.Run`'s."""

    name, library_class = "aim", "Aim"
    requires_logging_directory = True
    writer = _held()

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def start(self) -> None:
        """Begin the run."""
        self.writer = self.library.library.Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log images by name, or pairs of image and caption.

        kwargs: `aim_image` and `track`, the arguments of each for every image.
        """
        more = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            shown = self.library.library.Image(image, caption=caption, **more.get("aim_image", {}))
            self.library.log({name: shown}, step=step, **more.get("track", {}))


@library_tracker
class DVCLiveTracker(_Wrapping):
    """DVCLive. `run_name` means nothing; further arguments are `dvclive.Live`'s."""

    name, library_class = "dvclive", "DVCLive"
    live = _held()

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    def start(self) -> None:
        """Begin, unless a Live was given."""
        self.live = self.live or self.library.library.Live(**self.init_kwargs)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log what DVCLive takes for a metric; warn of the rest."""
        taken = {name: value for name, value in values.items() if self.library.could_log(value)}
        for name in values.keys() - taken.keys():
            warn_once(f"dvclive cannot log {name!r} ({type(values[name]).__qualname__}); skipped")
        self.library.log(taken, step=step, **kwargs)
        self.library.end_log()


@library_tracker
class MLflowTracker(_Wrapping):
    """MLflow. MLFLOW_EXPERIMENT_NAME, _RUN_ID, _TAGS, _NESTED_RUN win over arguments."""

    name, library_class = "mlflow", "MLflow"
    active_run = _held()

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        tags = os.environ.get("MLFLOW_TAGS", tags)
        nested: Any = os.environ.get("MLFLOW_NESTED_RUN", nested_run)
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.run_id = os.environ.get("MLFLOW_RUN_ID", run_id)
        self.tags = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = str_to_bool(nested) == 1 if isinstance(nested, str) else nested
        self.logging_dir, self.description = logging_dir, description

    def start(self) -> None:
        """Begin the run, in the experiment of that name."""
        self.active_run = self.library.library.start_run(
            run_id=self.run_id,
            experiment_id=self.library.experiment(self.experiment_name, self.logging_dir, self.tags),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store parameters; skip those too long for MLflow."""
        longest = self.library.library.utils.validation.MAX_PARAM_VAL_LENGTH
        kept = {name: value for name, value in values.items() if len(str(value)) <= longest}
        for name in values.keys() - kept.keys():
            warn_once(f"mlflow takes {longest} characters; {name!r} is left out")
        self.library.log_parameters(kept)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers; the rest is left out."""
        self.library.log(_numbers(self.name, values), step=step, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """A figure, as a file of the run."""
        self.library.library.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """A folder's files."""
        self.library.library.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """A file."""
        self.library.library.log_artifact(local_path=local_path, artifact_path=artifact_path)


@library_tracker
class ClearMLTracker(_WithTables):
    """ClearML. Other arguments are `Task.init`'s; CLEARML_PROJECT, CLEARML_TASK win."""

    name, library_class = "clearml", "ClearML"
    task = _held()

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    def start(self) -> None:
        """Begin a task, unless there is one."""
        named = {
            f"{what}_name": os.environ.get(f"CLEARML_{what.upper()}", self.run_name)
            for what in ("project", "task")
        }
        self.library.open(self.run_name, **{**named, **self.init_kwargs})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers.

        The prefixes eval_, test_ and train_ name the series. Without a step they are single values.
        """
        self.library.log(_numbers(self.name, values), step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, of columns and rows or of a dataframe."""
        if dataframe is None and data is None:
            raise ValueError(
                "`ClearMLTracker.log_table` requires that `data` to be supplied if `dataframe` is `None`"
            )
        super().log_table(table_name, columns, data, dataframe, step, **kwargs)
