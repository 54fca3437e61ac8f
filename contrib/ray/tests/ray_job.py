"""The scripts of tests: `ray_job.py TASK FOLDER`."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "OMP_NUM_THREADS",
    "ACCEL_RUN_ID",
    "ACCEL_GIVEN",
)


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
    facts |= {"process": os.getpid(), "host": socket.gethostname(), "folder": str(Path.cwd()), **more}
    beside = folder / f".rank{os.environ['RANK']}"
    beside.write_text(json.dumps(facts))
    beside.rename(folder / f"rank{os.environ['RANK']}.json")


def wait(folder: Path) -> None:
    """Wait to be ended."""
    write(folder)
    time.sleep(600)


def fail(folder: Path) -> None:
    """Rank 3 leaves with an exit code; the others wait to be ended."""
    write(folder)
    if os.environ["RANK"] == "3":
        sys.exit(7)
    time.sleep(120)


def train(folder: Path) -> None:
    """Train 40 steps, slowly until a node is lost; save after each, and go on from the last checkpoint."""
    import torch

    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    resumed = accelerator.load_state(folder / "last", missing_ok=True) is not None
    began = steps.done
    write(folder, began=began)
    while steps.done < 40:
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        steps.done += 1
        accelerator.save_state(folder / "last")
        time.sleep(0 if resumed else 1)
        if accelerator.is_main_process:
            (folder / "step").write_text(str(steps.done))
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
    {"meet": meet, "fail": fail, "train": train, "wait": wait, "write": write}[sys.argv[1]](Path(sys.argv[2]))
