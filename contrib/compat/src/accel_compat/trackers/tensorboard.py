"""TensorBoard's tracker as Accelerate has it.

Its files differ from the files of accel-trackers.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from accel_compat.state.operations import listify
from accel_compat.trackers.base import GeneralTracker, library_tracker


@library_tracker
class TensorBoardTracker(GeneralTracker):
    """TensorBoard's files in `logging_dir/run_name`.

    Other arguments are SummaryWriter's.
    """

    name = "tensorboard"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs, self.logging_dir_param = run_name, kwargs, logging_dir

    @property
    def tracker(self) -> Any:
        """The writer."""
        return self.writer

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
        import yaml

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
