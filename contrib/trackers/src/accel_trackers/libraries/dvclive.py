"""DVCLive. Read: dvclive 3.49."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from accel_trackers.libraries.library import Library
from accel_trackers.values import as_csv, as_images, leads_out

if TYPE_CHECKING:
    from accel_trackers.options import TrackerConfig

__all__ = ["DVCLive"]


class DVCLive(Library):
    """`dvclive.Live`: a folder per run, which a resumed run continues."""

    module = "dvclive"
    offline_environment: ClassVar = {"DVC_STUDIO_OFFLINE": "true", "DVC_NO_ANALYTICS": "true"}

    def starter(self) -> Callable[..., Any]:
        return self.library.Live  # type: ignore[no-any-return]

    def arguments(self, config: TrackerConfig, folder: Path, run_id: str, *, resumed: bool) -> dict[str, Any]:
        if not resumed and config.run_name:
            run_id = f"{config.run_name}-{run_id[:8]}"
        own = folder / run_id
        local = {"save_dvc_exp": False} if config.offline else {}
        return {"dir": str(own), "resume": resumed, "dvcyaml": str(own / "dvc.yaml"), **local}

    def open(self, project: str, **arguments: Any) -> None:
        self.handle = self.handle or self.library.Live(**arguments)

    def run_id(self, asked: str) -> str:
        return Path(self.handle.dir).name

    def configure(self, values: Mapping[str, Any]) -> None:
        self.handle.log_params(values)

    def could_log(self, value: Any) -> bool:
        """True for a value that is a metric to DVCLive."""
        return bool(import_module("dvclive.plots").Metric.could_log(value))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        if step is not None:
            self.handle.step = step
        for name, value in values.items():
            self.handle.log_metric(_inside(name), value, **options)

    def end_log(self) -> None:
        step = self.handle.step
        try:
            self.handle.next_step()
        finally:  # it counts after its report, which may fail
            self.handle.step = step + 1

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        if step is not None:
            self.handle.step = step
        for name, images in values.items():
            several = as_images(images)
            for number, image in enumerate(several):
                shown = _inside(name) if len(several) == 1 else f"{_inside(name)}-{number}"
                self.handle.log_image(f"{shown}.png", image, **options)

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
        place = _inside(table_name) if step is None else f"{_inside(table_name)}/{step}"
        path = Path(self.handle.dir, "tables", f"{place}.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def log_file(self, path: Path, name: str) -> None:
        # DVCLive's `log_artifact` skips files outside a DVC repository.
        place = Path(self.handle.dir, "artifacts", name)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)

    def log_reference(self, name: str, facts: Mapping[str, Any]) -> None:
        self.handle.log_param(f"artifacts.{name}", dict(facts))

    def close(self) -> None:
        self.handle.end()


def _inside(name: str) -> str:
    """The name, of which DVCLive makes the path of a file."""
    if leads_out(name):
        raise ValueError("the file of that name would lie outside the run's folder")
    return name
