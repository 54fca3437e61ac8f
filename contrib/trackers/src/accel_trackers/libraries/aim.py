"""Aim. Read: aim 3.29."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_core import ConfigError
from accel_trackers.libraries.library import Library
from accel_trackers.values import as_csv, as_images

if TYPE_CHECKING:
    from accel_trackers.options import TrackerConfig

__all__ = ["Aim"]


class Aim(Library):
    """`aim.Run`, in a repository that lies in a folder."""

    module = "aim"
    takes_addresses = True

    def prepare(self, config: TrackerConfig, folder: Path) -> None:
        super().prepare(config, folder)
        if config.offline and "://" in (config.directory or ""):
            raise ConfigError(
                f"aim: offline is asked for, and directory is {config.directory}\n"
                "give a folder, or leave offline out"
            )

    def starter(self) -> Callable[..., Any]:
        return self.library.Run  # type: ignore[no-any-return]

    def arguments(self, config: TrackerConfig, folder: Path, run_id: str, *, resumed: bool) -> dict[str, Any]:
        place = config.directory if "://" in (config.directory or "") else str(folder)
        # Its record of the terminal holds what is printed, secrets included. A killed run left its lock.
        known = {"run_hash": run_id, "force_resume": True} if resumed else {}
        more = {"run_name": config.run_name, "tags": config.tags}
        return {"repo": place, **known, **more, "capture_terminal_logs": False}

    def open(self, project: str, **arguments: Any) -> None:
        run_name, tags = arguments.pop("run_name", None), arguments.pop("tags", ())
        self.handle = self.library.Run(experiment=project, **arguments)
        if run_name is not None:
            self.handle.name = run_name
        for tag in tags:
            if tag not in self.handle.tags:
                self.handle.add_tag(tag)

    def run_id(self, asked: str) -> str:
        return str(self.handle.hash)

    def configure(self, values: Mapping[str, Any]) -> None:
        self.handle["hparams"] = values

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, value in values.items():
            shown = self.library.Text(value) if isinstance(value, str) else value
            self.handle.track(shown, name=name, step=step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, images in values.items():
            shown = [self.library.Image(image) for image in as_images(images)]
            self.handle.track(shown[0] if len(shown) == 1 else shown, name=name, step=step, **options)

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
        self.log({table_name: text}, step)

    def log_file(self, path: Path, name: str) -> None:
        if self.handle.artifacts_uri is None:
            self.handle.set_artifacts_uri(Path(self.handle.repo.path, "artifacts").as_uri())
        self.handle.log_artifact(str(path), name=name, block=True)

    def log_reference(self, name: str, facts: Mapping[str, Any]) -> None:
        self.handle["artifacts", name] = dict(facts)

    def close(self) -> None:
        self.handle.close()
