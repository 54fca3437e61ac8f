"""The trackers of two libraries that also keep models and files: MLflow and ClearML."""

from __future__ import annotations

import json
import os
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

from accel_compat.environment.variables import str_to_bool
from accel_compat.notices import warn_once
from accel_compat.trackers.base import GeneralTracker, library_tracker
from accel_compat.trackers.libraries import scalars


@library_tracker
class MLflowTracker(GeneralTracker):
    """MLflow. MLFLOW_EXPERIMENT_NAME, _RUN_ID, _TAGS, _NESTED_RUN win over arguments."""

    name = "mlflow"
    requires_logging_directory: ClassVar[bool] = False

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
        tags = os.environ.get("MLFLOW_TAGS", tags)
        nested: Any = os.environ.get("MLFLOW_NESTED_RUN", nested_run)
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.run_id = os.environ.get("MLFLOW_RUN_ID", run_id)
        self.tags = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = str_to_bool(nested) == 1 if isinstance(nested, str) else nested
        self.logging_dir, self.run_name, self.description = logging_dir, run_name, description

    @cached_property
    def library(self) -> Any:
        """The module."""
        return import_module("mlflow")

    def start(self) -> None:
        """Begin the run, in the experiment of that name."""
        known = self.library.search_experiments(filter_string=f"name = '{self.experiment_name}'")
        experiment = (
            known[0].experiment_id
            if known
            else self.library.create_experiment(
                name=self.experiment_name, artifact_location=self.logging_dir, tags=self.tags
            )
        )
        self.active_run = self.library.start_run(
            run_id=self.run_id,
            experiment_id=experiment,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @property
    def tracker(self) -> Any:
        """MLflow's run."""
        return self.active_run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store parameters in batches of MLflow's size; skip those too long for it."""
        limits = self.library.utils.validation
        kept = []
        for name, value in values.items():
            if len(str(value)) > limits.MAX_PARAM_VAL_LENGTH:
                warn_once(f"mlflow takes {limits.MAX_PARAM_VAL_LENGTH} characters; {name!r} is left out")
            else:
                kept.append((name, value))
        size = limits.MAX_PARAMS_TAGS_PER_BATCH
        for start in range(0, len(kept), size):
            self.library.log_params(dict(kept[start : start + size]))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers; the rest is left out."""
        self.library.log_metrics(scalars(self.name, values), step=step, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Return a figure, as a file of the run."""
        self.library.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Return a folder's files."""
        self.library.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Return a file."""
        self.library.log_artifact(local_path=local_path, artifact_path=artifact_path)

    def finish(self) -> None:
        """End the run."""
        self.library.end_run()


@library_tracker
class ClearMLTracker(GeneralTracker):
    """ClearML. Other arguments are `Task.init`'s; CLEARML_PROJECT, CLEARML_TASK win."""

    name = "clearml"
    requires_logging_directory: ClassVar[bool] = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.user_provided_run_name, self.init_kwargs = run_name, kwargs
        self._initialized_externally = False

    def start(self) -> None:
        """Begin a task, unless there is one."""
        tasks: Any = import_module("clearml").Task
        self.task = tasks.current_task()
        self._initialized_externally = bool(self.task)
        if not self.task:
            named = {
                f"{what}_name": os.environ.get(f"CLEARML_{what.upper()}", self.user_provided_run_name)
                for what in ("project", "task")
            }
            self.task = tasks.init(**{**named, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """ClearML's task."""
        return self.task

    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        """Store the task's configuration."""
        return self.task.connect_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers: eval_, test_ and train_ name the series. Without a step they are single values."""
        report = self.task.get_logger()
        for name, value in scalars(self.name, values).items():
            if step is None:
                report.report_single_value(name=name, value=value, **kwargs)
            else:
                report.report_scalar(**_titled(name), value=value, iteration=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Images, by name."""
        for name, image in values.items():
            self.task.get_logger().report_image(**_titled(name), iteration=step, image=image, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Return a table, of columns and rows or of a dataframe."""
        if dataframe is None and data is None:
            raise ValueError(
                "`ClearMLTracker.log_table` requires that `data` to be supplied if `dataframe` is `None`"
            )
        table = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or ())]
        self.task.get_logger().report_table(**_titled(table_name), table_plot=table, iteration=step, **kwargs)

    def finish(self) -> None:
        """End the task, if it was begun here."""
        if self.task and not self._initialized_externally:
            self.task.close()


def _titled(name: str) -> dict[str, str]:
    series = next((each for each in ("eval", "test", "train") if name.startswith(f"{each}_")), None)
    return (
        {"title": name, "series": "train"}
        if series is None
        else {
            "title": name[len(series) + 1 :],
            "series": series,
        }
    )
