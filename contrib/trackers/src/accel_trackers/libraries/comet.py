"""Comet. Read: comet_ml 3.58."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from accel_trackers.libraries.library import Library
from accel_trackers.values import as_csv, as_images

if TYPE_CHECKING:
    from accel_trackers.options import TrackerConfig

__all__ = ["Comet"]


class Comet(Library):
    """`comet_ml.start`, and its experiment.

    Offline, each process that ends leaves an archive of the same key.
    """

    module = "comet_ml"
    offline_environment: ClassVar = {"COMET_LOGGING_METRICS_IGNORE": "", "COMET_INTERNAL_SENTRY_DSN": ""}

    def starter(self) -> Callable[..., Any]:
        return getattr(self.library, "start", self.library.Experiment)  # type: ignore[no-any-return]

    def arguments(self, config: TrackerConfig, folder: Path, run_id: str, *, resumed: bool) -> dict[str, Any]:
        # Records of the command line and of what is printed may hold secrets; and two libraries that both
        # wrap the terminal leave it broken.
        shown = self.library.ExperimentConfig(
            name=config.run_name,
            tags=list(config.tags),
            offline_directory=str(folder),
            parse_args=False,
            log_env_details=False,
            auto_output_logging=False,
        )
        offline = {"online": False} if config.offline else {}
        mode = {"experiment_key": run_id, "mode": "get_or_create"}
        return {**offline, **mode, "experiment_config": shown}

    def open(self, project: str, **arguments: Any) -> None:
        self.handle = self.starter()(project_name=project, **arguments)

    def run_id(self, asked: str) -> str:
        return str(self.handle.get_key())

    def configure(self, values: Mapping[str, Any]) -> None:
        self.handle.log_parameters(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        if step is not None:
            self.handle.set_step(step)
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.handle.log_metric(name, value, step=step, **options)
            elif isinstance(value, str):
                self.handle.log_other(name, value)
            elif isinstance(value, dict):
                self.handle.log_metrics(value, step=step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, images in values.items():
            for image in as_images(images):
                self.handle.log_image(image, name=name, step=step, **options)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        text = as_csv(columns or (), data or ()) if dataframe is None else dataframe.to_csv(index=False)
        self.handle.log_asset_data(text, name=f"{table_name}.csv", step=step, **options)

    def log_file(self, path: Path, name: str) -> None:
        self.handle.log_asset(str(path), file_name=name)

    def log_reference(self, name: str, facts: Mapping[str, Any]) -> None:
        self.handle.log_remote_asset(facts["uri"], remote_file_name=name, metadata=dict(facts))

    def close(self) -> None:
        self.handle.end()
