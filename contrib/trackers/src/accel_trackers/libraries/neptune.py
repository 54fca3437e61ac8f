"""Neptune 2.x. Read: neptune 1.14."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_trackers.libraries.library import Library
from accel_trackers.values import as_csv, as_images, flat

if TYPE_CHECKING:
    from accel_trackers.options import TrackerConfig

__all__ = ["Neptune"]


class Neptune(Library):
    """`neptune.init_run`, with a custom run id.

    Offline, Neptune does not store that id: a resumed run is a second one, with the same `accel/run`.
    """

    module = "neptune"

    def prepare(self, config: TrackerConfig, folder: Path) -> None:
        super().prepare(config, folder)
        if config.directory is not None or "NEPTUNE_DATA_DIRECTORY" not in os.environ:
            os.environ["NEPTUNE_DATA_DIRECTORY"] = str(folder)

    def starter(self) -> Callable[..., Any]:
        return self.library.init_run  # type: ignore[no-any-return]

    def arguments(self, config: TrackerConfig, folder: Path, run_id: str, *, resumed: bool) -> dict[str, Any]:
        offline = {"mode": "offline"} if config.offline else {}
        # What is printed may hold secrets; and two libraries that both wrap the terminal leave it broken.
        quiet: dict[str, Any] = {"capture_stdout": False, "capture_stderr": False, "source_files": []}
        named = {"name": config.run_name, "tags": list(config.tags) or None}
        return {**named, **offline, **quiet, "custom_run_id": run_id}

    def open(self, project: str, **arguments: Any) -> None:
        self.handle = self.library.init_run(project=project, **arguments)
        if "custom_run_id" in arguments:  # offline files have it nowhere else
            self.handle["accel/run"] = arguments["custom_run_id"]

    def configure(self, values: Mapping[str, Any]) -> None:
        settings = self.library.utils.stringify_unsupported(dict(flat(values)))
        for name, value in settings.items():
            self.handle[f"config/{name}"] = value

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, value in values.items():
            self.handle[name].append(value, step=step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, images in values.items():
            for image in as_images(images):
                self.handle[name].append(self.library.types.File.as_image(image), step=step, **options)

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
        place = table_name if step is None else f"{table_name}/{step}"
        self.handle[place].upload(self.library.types.File.from_content(text, extension="csv"), **options)

    def log_file(self, path: Path, name: str) -> None:
        self.handle[f"artifacts/{name}"].upload(str(path))

    def log_reference(self, name: str, facts: Mapping[str, Any]) -> None:
        for fact, value in facts.items():
            self.handle[f"artifacts/{name}/{fact}"] = value

    def flush(self) -> None:
        self.handle.wait(disk_only=True)

    def close(self) -> None:
        self.handle.stop()
