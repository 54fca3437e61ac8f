"""SwanLab. Read: swanlab 0.10."""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_core import ConfigError
from accel_trackers.libraries.library import Library
from accel_trackers.values import as_csv, as_images

if TYPE_CHECKING:
    from accel_trackers.options import TrackerConfig

__all__ = ["SwanLab"]


class SwanLab(Library):
    """`swanlab.init`, and its run.

    Offline, a resumed run has a second folder of the same id.
    """

    module = "swanlab"
    _files: Path
    """A folder for files of this run, which SwanLab links to."""

    def check_project(self, project: str) -> None:
        super().check_project(project)
        try:
            self.library.Settings(project={"name": project})
        except Exception as error:  # pydantic's
            reason = " ".join(str(error).split("\n", 3)[2:3]).strip()
            raise ConfigError(
                f"swanlab refuses the project {project!r}: {reason}\ntake another name"
            ) from error

    def starter(self) -> Callable[..., Any]:
        return self.library.init  # type: ignore[no-any-return]

    def arguments(self, config: TrackerConfig, folder: Path, run_id: str, *, resumed: bool) -> dict[str, Any]:
        self._files = folder / "artifacts" / run_id
        offline = {"mode": "offline"} if config.offline else {}
        named = {"name": config.run_name, "tags": list(config.tags) or None}
        # The command line, a part of "runtime", and what is printed may hold secrets; and two libraries that
        # both wrap the terminal leave it broken.
        settings = self.library.Settings(console={"proxy_type": "none"}, probe={"runtime": False})
        quiet = {"settings": settings}
        return {**named, **offline, **quiet, "log_dir": str(folder), "id": run_id, "resume": "allow"}

    def open(self, project: str, **arguments: Any) -> None:
        self.handle = self.library.init(project=project, **arguments)

    def configure(self, values: Mapping[str, Any]) -> None:
        self.library.config.update(values)  # a keyword would be a setting

    def parts(self, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [values]  # each call without a step is a step of its own

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        shown = {
            name: self.library.Text(value) if isinstance(value, str) else value
            for name, value in values.items()
        }
        self.handle.log(shown, step=step, **options)

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
        text = as_csv(columns or (), data or ()) if dataframe is None else dataframe.to_csv(index=False)
        self.log({table_name: text}, step)

    def log_file(self, path: Path, name: str) -> None:
        copy = self._files / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        if not self.library.save(glob.escape(str(copy)), base_path=str(self._files), policy="now"):
            raise OSError(f"SwanLab does not take {copy}")

    def log_reference(self, name: str, facts: Mapping[str, Any]) -> None:
        self.log({f"artifacts/{name}": json.dumps(dict(facts))})

    def close(self) -> None:
        self.handle.finish()
