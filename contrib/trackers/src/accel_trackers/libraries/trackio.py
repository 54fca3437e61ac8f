"""Trackio. Read: trackio 0.43."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from accel_core import ConfigError
from accel_trackers.libraries.library import Library
from accel_trackers.values import as_identifier, as_images

if TYPE_CHECKING:
    from accel_trackers.options import TrackerConfig

__all__ = ["Trackio"]

_REMOTE = "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"


class Trackio(Library):
    """`trackio.init`, and its run, which Trackio finds again by its name."""

    module = "trackio"
    offline_environment: ClassVar = {"HF_HUB_OFFLINE": "1"}

    def prepare(self, config: TrackerConfig, folder: Path) -> None:
        super().prepare(config, folder)
        if config.offline and (remote := [name for name in _REMOTE if os.environ.get(name)]):
            raise ConfigError(f"trackio: offline is asked for, and {remote[0]} is set\nunset one of the two")
        if config.directory is None and "TRACKIO_DIR" in os.environ:
            return
        os.environ["TRACKIO_DIR"] = str(folder)
        used = str(self.library.TRACKIO_DIR)  # read when it is imported
        if os.path.realpath(used) != os.path.realpath(folder):
            raise ConfigError(
                f"trackio: the folder {folder} is asked for, and trackio was imported for {used} before\n"
                f"import it later, or set TRACKIO_DIR={folder} before it is imported"
            )

    def check_project(self, project: str) -> None:
        super().check_project(project)
        try:
            self.library.SQLiteStorage.validate_project_name(project)
        except ValueError as error:
            raise ConfigError(
                f"trackio refuses the project {project!r}: {error}\ntake another name"
            ) from error

    def starter(self) -> Callable[..., Any]:
        return self.library.init  # type: ignore[no-any-return]

    def arguments(self, config: TrackerConfig, folder: Path, run_id: str, *, resumed: bool) -> dict[str, Any]:
        name = run_id if resumed or config.run_name is None else f"{config.run_name}-{run_id[:8]}"
        tags = {"config": {"tags": list(config.tags)}} if config.tags else {}
        return {"name": name, "resume": "allow", "embed": False, **tags}

    def open(self, project: str, **arguments: Any) -> None:
        self.handle = self.library.init(project=project, **arguments)

    def run_id(self, asked: str) -> str:
        return str(self.handle.name)

    def configure(self, values: Mapping[str, Any]) -> None:
        self.library.config.update(values)

    def parts(self, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [values]  # each call without a step is a step of its own

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self.handle.log(values, step=step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, images in values.items():
            several = as_images(images)
            names = [name] if len(several) == 1 else [f"{name}/{number}" for number in range(len(several))]
            shown = zip(names, several, strict=True)
            self.log({each: self.library.Image(image) for each, image in shown}, step=step, **options)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        if dataframe is None and find_spec("pandas") is None:
            rows = [dict(zip(columns or (), row, strict=True)) for row in data or ()]
            self.log({table_name: rows}, step=step)
            return
        table = self.library.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **options)

    def log_file(self, path: Path, name: str) -> None:
        self.handle.log_artifact(str(path), name=as_identifier(name), type="file")

    def log_reference(self, name: str, facts: Mapping[str, Any]) -> None:
        artifact = self.library.Artifact(as_identifier(name), type="folder", metadata=dict(facts))
        artifact.add_reference(facts["uri"], checksum=False)  # a checksum would read every byte
        self.handle.log_artifact(artifact)

    def close(self) -> None:
        self.handle.finish()
