"""ClearML. Read: clearml 2.1."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from accel_trackers.libraries.library import Library
from accel_trackers.values import as_images, is_finite

if TYPE_CHECKING:
    from accel_trackers.options import TrackerConfig

__all__ = ["ClearML"]


class ClearML(Library):
    """`Task.init`, and its task; a task that the script began is used, and left open."""

    module = "clearml"
    offline_environment: ClassVar = {"CLEARML_OFFLINE_MODE": "1"}
    _begun: bool = True
    """False for a task that was there before."""

    @property
    def tasks(self) -> Any:
        """ClearML's class of tasks."""
        return self.library.Task

    def prepare(self, config: TrackerConfig, folder: Path) -> None:
        super().prepare(config, folder)
        if config.offline:
            os.environ["CLEARML_CACHE_DIR"] = str(folder)
            self.tasks.set_offline(True)
            # Else it looks for a newer version of itself, in a thread.
            import_module(
                "clearml.utilities.check_updates"
            ).CheckPackageUpdates._package_version_checked = True

    def starter(self) -> Callable[..., Any]:
        return self.tasks.init  # type: ignore[no-any-return]

    def arguments(self, config: TrackerConfig, folder: Path, run_id: str, *, resumed: bool) -> dict[str, Any]:
        # It would patch argparse, torch.save and the terminal: they hold secrets and weights.
        quiet = dict.fromkeys(
            ("auto_connect_arg_parser", "auto_connect_frameworks", "auto_connect_streams"), False
        )
        # 0: iterations are not shifted by those of the run before.
        known = (
            {"reuse_last_task_id": run_id, "continue_last_task": 0}
            if resumed
            else {"reuse_last_task_id": False}
        )
        named = {} if config.run_name is None else {"task_name": config.run_name}
        return {**quiet, **known, **named, "tags": list(config.tags) or None}

    def open(self, project: str | None, **arguments: Any) -> None:
        self.handle = self.tasks.current_task()
        self._begun = not self.handle
        if self._begun:
            self.handle = self.tasks.init(**{"project_name": project, "task_name": project, **arguments})

    def run_id(self, asked: str) -> str:
        return str(self.handle.id)

    def configure(self, values: Mapping[str, Any]) -> Any:
        return self.handle.connect_configuration(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log numbers and texts.

        The prefixes eval_, test_ and train_ name the series of numbers. Numbers without a step are single
        values. What is not finite is text: ClearML draws it as 0.
        """
        report = self.handle.get_logger()
        for name, value in values.items():
            if isinstance(value, str) or not is_finite(value):
                report.report_text(f"{name}: {value}", print_console=False)
            elif step is None:
                report.report_single_value(name=name, value=value, **options)
            else:
                report.report_scalar(**_titled(name), value=value, iteration=step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, images in values.items():
            for image in as_images(images):
                self.handle.get_logger().report_image(**_titled(name), iteration=step, image=image, **options)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        table = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or ())]
        self.handle.get_logger().report_table(
            **_titled(table_name), table_plot=table, iteration=step, **options
        )

    def log_file(self, path: Path, name: str) -> None:
        self.handle.upload_artifact(name, str(path), wait_on_upload=True)

    def log_reference(self, name: str, facts: Mapping[str, Any]) -> None:
        self.handle.upload_artifact(name, dict(facts), wait_on_upload=True)

    def flush(self) -> None:
        self.handle.flush(wait_for_uploads=True)

    def close(self) -> None:
        if self.handle and self._begun:
            self.handle.close()


def _titled(name: str) -> dict[str, str]:
    series = next((word for word in ("eval", "test", "train") if name.startswith(f"{word}_")), None)
    if series is None:
        return {"title": name, "series": "train"}
    return {"title": name[len(series) + 1 :], "series": series}
