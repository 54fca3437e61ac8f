"""MLflow. Read: mlflow 3.17."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from accel_trackers.libraries.library import Library
from accel_trackers.values import as_images, flat

if TYPE_CHECKING:
    from accel_trackers.options import TrackerConfig

__all__ = ["MLflow"]


class MLflow(Library):
    """MLflow's active run, in the experiment of the project's name."""

    module = "mlflow"
    offline_environment: ClassVar = {"MLFLOW_DISABLE_TELEMETRY": "true"}
    _place: str | None = None
    """The place of files of an experiment that is made here."""

    def prepare(self, config: TrackerConfig, folder: Path) -> None:
        super().prepare(config, folder)
        if config.offline or config.directory is not None:
            self.library.set_tracking_uri(f"sqlite:///{folder.resolve()}/mlflow.db")
            self._place = (folder.resolve() / "artifacts").as_uri()

    def starter(self) -> Callable[..., Any]:
        return self.library.start_run  # type: ignore[no-any-return]

    def arguments(self, config: TrackerConfig, folder: Path, run_id: str, *, resumed: bool) -> dict[str, Any]:
        known = {"run_id": run_id} if resumed else {"run_name": config.run_name}
        return {**known, "tags": dict.fromkeys(config.tags, "true") or None}

    def open(self, project: str, **arguments: Any) -> None:
        self.handle = self.library.start_run(experiment_id=self.experiment(project), **arguments)

    def experiment(self, name: str | None, place: Any = None, tags: Mapping[str, Any] | None = None) -> Any:
        """The id of the experiment of that name, which is made if there is none.

        place: of the artifacts of one that is made.
        """
        known = self.library.get_experiment_by_name(f"{name}")
        if known and known.lifecycle_stage == "active":
            return known.experiment_id
        place = place or self._place
        return self.library.create_experiment(name=name, artifact_location=place, tags=tags)

    def run_id(self, asked: str) -> str:
        return str(self.handle.info.run_id)

    def configure(self, values: Mapping[str, Any]) -> None:
        """Note settings; a resumed run keeps those that it has.

        Texts too long for MLflow are cut. The settings that it refuses cost no others.

        Raises:
            ValueError: with the settings that are not noted, after the others are.
        """
        longest = self.library.utils.validation.MAX_PARAM_VAL_LENGTH
        known = self.library.get_run(self.handle.info.run_id).data.params
        settings = {name: str(value)[:longest] for name, value in flat(values)}
        left = [
            f"{name} stays {known[name]}, and is {value} now"
            for name, value in settings.items()
            if known.get(name, value) != value
        ]
        new = {name: value for name, value in settings.items() if name not in known}
        try:
            self.log_parameters(new)
        except self.library.MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":  # of one of them
                raise
            left += self._log_each(new)
        if left:
            raise ValueError("; ".join(left))

    def _log_each(self, values: Mapping[str, Any]) -> list[str]:
        """Log parameters one by one; return why some of them could not be."""
        refused = []
        for name, value in values.items():
            try:
                self.library.log_params({name: value})
            except self.library.MlflowException as error:
                refused.append(f"{name!r}: {error}")
        return refused

    def log_parameters(self, values: Mapping[str, Any]) -> None:
        """Log parameters, in batches of MLflow's size."""
        size = self.library.utils.validation.MAX_PARAMS_TAGS_PER_BATCH
        names = list(values)
        for start in range(0, len(names), size):
            self.library.log_params({name: values[name] for name in names[start : start + size]})

    def parts(self, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [part for part in _numbers_and_texts(values) if part]

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log numbers; texts become tags."""
        numbers, texts = _numbers_and_texts(values)
        if numbers:
            self.library.log_metrics(numbers, step=step, **options)
        if texts:
            self.library.set_tags(texts)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, images in values.items():
            for number, image in enumerate(as_images(images)):
                file = f"images/{name}/{0 if step is None else step}-{number}.png"
                self.library.log_image(image, file, **options)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        lists = {name: [row[number] for row in data or ()] for number, name in enumerate(columns or ())}
        table = lists if dataframe is None else dataframe
        place = (
            table_name if step is None else f"{table_name}/{step}"
        )  # MLflow appends to a file that is there
        self.library.log_table(table, f"{place}.json", **options)

    def log_file(self, path: Path, name: str) -> None:
        with TemporaryDirectory() as folder:  # MLflow keeps a file under the name that it has
            copy = Path(folder, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            self.library.log_artifacts(folder)

    def log_reference(self, name: str, facts: Mapping[str, Any]) -> None:
        self.library.log_dict(dict(facts), f"references/{name}.json")

    def close(self) -> None:
        self.library.end_run()


def _numbers_and_texts(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    return {name: value for name, value in values.items() if name not in texts}, texts
