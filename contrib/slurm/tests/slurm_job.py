"""The scripts of tests: `slurm_job.py TASK FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ACCEL_RUN_ID")


def meet(folder: Path) -> None:
    """Add up the ranks, and write this rank's world."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor(dist.get_rank())
    dist.all_reduce(number)
    write(folder, sum=number.item())
    dist.destroy_process_group()


def write(folder: Path, **more: object) -> None:
    facts = {name: os.environ.get(name) for name in VARIABLES}
    name = f"{os.environ['ACCEL_RUN_ID']}-rank{os.environ['RANK']}.json"
    (folder / name).write_text(json.dumps({**facts, **more, "process": os.getpid()}))


def fail(folder: Path) -> None:
    """Rank 3 leaves with an exit code; the others wait to be ended."""
    write(folder)
    if os.environ["RANK"] == "3":
        sys.exit(7)
    time.sleep(120)


def train(folder: Path) -> None:
    """Train 400 steps, the first time slowly; go on from the checkpoint of a job that was told to stop."""
    import torch

    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    resumed = accelerator.load_state(folder / "last", missing_ok=True) is not None
    began = steps.done
    while steps.done < 400:
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        steps.done += 1
        if accelerator.is_main_process:
            (folder / "step").write_text(str(steps.done))
        if accelerator.save_on_preemption(folder / "last"):
            return
        time.sleep(0 if resumed else 0.2)
    if accelerator.is_main_process:
        (folder / "done").write_text(json.dumps({"began": began, "ended": steps.done}))
    accelerator.end_training()


def train_on(folder: Path) -> None:
    """Train 200 steps, the first time slowly, and save at each fifth; go on from the last checkpoint."""
    import torch

    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    resumed = accelerator.load_state(folder / "last", missing_ok=True) is not None
    began = steps.done
    while steps.done < 200:
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        steps.done += 1
        if steps.done % 5 == 0:
            accelerator.save_state(folder / "last")
            if accelerator.is_main_process:
                (folder / "saved").write_text(str(steps.done))
        time.sleep(0 if resumed else 0.3)
    if accelerator.is_main_process:
        (folder / "done").write_text(json.dumps({"began": began, "ended": steps.done}))
    accelerator.end_training()


class Steps:
    """The number of steps, kept in checkpoints."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


if __name__ == "__main__":
    tasks = {"meet": meet, "fail": fail, "train": train, "train_on": train_on, "write": write}
    tasks[sys.argv[1]](Path(sys.argv[2]))
