"""Weights & Biases. Read: wandb 0.31."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from accel_core import ConfigError
from accel_trackers.libraries.library import Library
from accel_trackers.values import as_identifier, as_images

if TYPE_CHECKING:
    from accel_trackers.options import TrackerConfig

__all__ = ["Wandb"]


class Wandb(Library):
    """`wandb.init`, and its run.

    Offline, a resumed run has a second folder of the same id, and `wandb sync` joins them.
    """

    module = "wandb"
    offline_environment: ClassVar = {"WANDB_ERROR_REPORTING": "false"}

    def check_project(self, project: str) -> None:
        super().check_project(project)
        try:
            self.library.Settings(project=project)
        except Exception as error:  # pydantic wraps it, or not
            reason = str(error).splitlines()[-1]
            raise ConfigError(
                f"wandb refuses the project {project!r}: {reason}\ntake another name"
            ) from error

    def starter(self) -> Callable[..., Any]:
        return self.library.init  # type: ignore[no-any-return]

    def arguments(self, config: TrackerConfig, folder: Path, run_id: str, *, resumed: bool) -> dict[str, Any]:
        offline = {"mode": "offline"} if config.offline else {}
        named = {"name": config.run_name, "tags": list(config.tags) or None}
        # The command line, a part of "meta", and what is printed may hold secrets; and two libraries that
        # both wrap the terminal leave it broken.
        quiet = {"settings": self.library.Settings(console="off", x_disable_meta=True)}
        return {**named, **offline, **quiet, "dir": str(folder), "id": run_id, "resume": "allow"}

    def open(self, project: str, **arguments: Any) -> None:
        self.handle = self.library.init(project=project, **arguments)

    def run_id(self, asked: str) -> str:
        return str(self.handle.id)

    def configure(self, values: Mapping[str, Any]) -> None:
        self.library.config.update(values, allow_val_change=True)

    def parts(self, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [values]  # each call without a step is a step of its own

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self.handle.log(values, step=step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, images in values.items():
            self.log({name: [self.library.Image(each) for each in as_images(images)]}, step=step, **options)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
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
