"""Digits, on as many processes as there are, with trackers: FOLDER NAMES FIRST LAST --key KEY [kill]."""

from __future__ import annotations

import no_network  # noqa: F401  before all else: it keeps this process from the network

# isort: split
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import accel_trackers
from accel_core import Accelerator, set_seed

OPTIONS = {
    "aim": "AimConfig",
    "clearml": "ClearMLConfig",
    "comet": "CometConfig",
    "dvclive": "DVCLiveConfig",
    "mlflow": "MLflowConfig",
    "neptune": "NeptuneConfig",
    "swanlab": "SwanLabConfig",
    "trackio": "TrackioConfig",
    "wandb": "WandbConfig",
}
SECRET = os.environ.get("COMET_API_KEY", "")  # libraries keep this text, so it is not in here
SETTINGS = {
    "lr": 0.1,
    "hidden": [64, 32],
    "api_key": SECRET,
    "nested": {"password": SECRET},
}


def batches():
    inputs, targets = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(
        torch.tensor(inputs, dtype=torch.float32) / 16, torch.tensor(targets)
    )
    return torch.utils.data.DataLoader(data, batch_size=32)


def main(folder, names, first, last, kill):
    plugins = [
        getattr(accel_trackers, OPTIONS[name])(offline=True, directory=f"{folder}/{name}", tags=("digits",))
        for name in names
    ]
    accelerator = Accelerator(cpu=True, log_with=["jsonl", *names], project_dir=folder, plugins=plugins)
    set_seed(0)
    model = nn.Linear(64, 10)
    loader, model, optimizer = accelerator.prepare(
        batches(), model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    accelerator.init_trackers("digits", SETTINGS)
    if first:
        accelerator.load_state(f"{folder}/checkpoint")
    for step, (inputs, targets) in zip(range(first, last), loader, strict=False):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.log(
            {"train": {"loss": mean, "half": mean / 2}, "note": f"at {step}", "gone": None}, step=step
        )
        if step == last - (3 if kill else 1):
            accelerator.save_state(f"{folder}/checkpoint")
    for name in names:
        if accelerator.is_main_process:
            tracker = accelerator.get_tracker(name)
            assert accelerator.get_tracker(name, unwrap=True) is tracker.tracker
            tracker.log_artifact(f"{folder}/checkpoint")
            Path(folder, "notes.txt").write_text("kept")
            tracker.log_artifact(f"{folder}/notes.txt")
            Path(folder, "notes.txt").write_text("changed")
            tracker.log_artifact(f"{folder}/notes.txt", name="again [1].txt")
            tracker.log_images({"shown": np.arange(192, dtype=np.uint8).reshape(8, 8, 3)}, step=last)
            tracker.log_table("rows", ["a", "b"], [[1, "x"], [2, "y"]], step=last)
    if kill:
        Path(folder, f"logged-{accelerator.process_index}").touch()
        while not Path(folder, "may-die").exists():  # libraries write in threads
            time.sleep(0.1)
        os._exit(9)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4]), sys.argv[7:] == ["kill"])
