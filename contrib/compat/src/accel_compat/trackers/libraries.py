"""The trackers of seven libraries, each of which is imported when its tracker starts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import yaml

from accel_compat.notices import warn_once
from accel_compat.state.operations import listify
from accel_compat.trackers.base import GeneralTracker, library_tracker


class _Wrapping(GeneralTracker):
    """Keeps what the library calls a run as `tracker`, from `start` on."""

    requires_logging_directory: ClassVar[bool] = False
    held: ClassVar[str] = "run"
    """The attribute that has it."""

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs

    @property
    def tracker(self) -> Any:
        """The library's own object."""
        return getattr(self, self.held)


def scalars(tracker: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among the values; that others have no place is said once."""
    for name, value in values.items():
        if not isinstance(value, (int, float)):
            warn_once(f"{tracker} cannot log {name!r} ({type(value).__qualname__}); skipped")
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


@library_tracker
class TensorBoardTracker(_Wrapping):
    """TensorBoard's files in `logging_dir/run_name`. Other arguments are SummaryWriter's."""

    name = "tensorboard"
    requires_logging_directory = True
    held = "writer"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir_param = logging_dir

    def start(self) -> None:
        """Open the files."""
        try:
            library: Any = import_module("torch.utils.tensorboard")
        except ModuleNotFoundError:
            library = import_module("tensorboardX")
        self.logging_dir = os.path.join(self.logging_dir_param, self.run_name)
        self.writer = library.SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters, also in hparams.yml beside the event files."""
        plain = (bool, int, float, str)
        shown = {name: each if isinstance(each, plain) else str(each) for name, each in values.items()}
        self.writer.add_hparams(shown, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir, str(time.time()))
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath("hparams.yml").write_text(yaml.dump(values), encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers, texts, and mappings of numbers."""
        for name, value in listify(values).items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Batches of images, by name."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    def finish(self) -> None:
        """Close the files."""
        self.writer.close()


@library_tracker
class _Hosted(_Wrapping):
    """Base for libraries with wandb's `init`, `config`, `run.log` and `run.finish`."""

    main_process_only = False
    _library: ClassVar[str]
    """Its name; `name` is a subclass's to choose."""

    @cached_property
    def library(self) -> Any:
        """The module."""
        return import_module(self._library)

    def start(self) -> None:
        """Begin the run; the project is called as the tracker's run."""
        self.run = self.library.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's config."""
        self.library.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Whatever the library can hold."""
        self.run.log(values, step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        self.run.finish()


@library_tracker
class _WithImages(_Hosted):
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images, by name."""
        for name, images in values.items():
            self.log({name: [self.library.Image(image) for image in images]}, step=step, **kwargs)


@library_tracker
class WandBTracker(_WithImages):
    """Weights & Biases. Further arguments are `wandb.init`'s."""

    name = _library = "wandb"

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
        table = self.library.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)


@library_tracker
class TrackioTracker(_Hosted):
    """Trackio. Further arguments are `trackio.init`'s."""

    name = _library = "trackio"


@library_tracker
class SwanLabTracker(_WithImages):
    """SwanLab. Further arguments are `swanlab.init`'s."""

    name = _library = "swanlab"


@library_tracker
class CometMLTracker(_Wrapping):
    """Comet. Further arguments are `comet_ml.start`'s."""

    name = "comet_ml"
    held = "writer"

    def start(self) -> None:
        """Begin the experiment."""
        library: Any = import_module("comet_ml")
        begin = getattr(library, "start", library.Experiment)  # releases before 3.41 have no `start`
        self.writer = begin(project_name=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store parameters."""
        self.writer.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers, texts, and mappings of numbers."""
        if step is not None:
            self.writer.set_step(step)
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)

    def finish(self) -> None:
        """End the experiment."""
        self.writer.end()


@library_tracker
class AimTracker(_Wrapping):
    """Aim, in the folder `logging_dir`. Further arguments are `aim.Run`'s."""

    name = "aim"
    requires_logging_directory = True
    held = "writer"

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def start(self) -> None:
        """Begin the run."""
        self.writer = import_module("aim").Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store `hparams`."""
        self.writer["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Whatever Aim can track."""
        for name, value in values.items():
            self.writer.track(value, name=name, step=step, **kwargs)

    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, Any] | None = None
    ) -> None:
        """Images by name, or pairs of image and caption. kwargs: `aim_image` and `track`, for each."""
        more = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            shown = import_module("aim").Image(image, caption=caption, **more.get("aim_image", {}))
            self.writer.track(shown, name=name, step=step, **more.get("track", {}))

    def finish(self) -> None:
        """End the run."""
        self.writer.close()


@library_tracker
class DVCLiveTracker(_Wrapping):
    """DVCLive. `run_name` means nothing; further arguments are `dvclive.Live`'s."""

    name = "dvclive"
    held = "live"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self.live = live

    def start(self) -> None:
        """Begin, unless a Live was given."""
        self.live = self.live or import_module("dvclive").Live(**self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store parameters."""
        self.live.log_params(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log what DVCLive takes for a metric; warn of the rest."""
        metric: Any = import_module("dvclive.plots").Metric
        if step is not None:
            self.live.step = step
        for name, value in values.items():
            if metric.could_log(value):
                self.live.log_metric(name, value, **kwargs)
            else:
                warn_once(f"dvclive cannot log {name!r} ({type(value).__qualname__}); skipped")
        self.live.next_step()

    def finish(self) -> None:
        """End."""
        self.live.end()
