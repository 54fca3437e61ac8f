"""The tasks of a launcher's workers: `tasks_launch.py TASK FOLDER [ARGUMENT]`."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_testing.kit.deadline import seconds

__all__ = ["configure", "exit_by_rank", "fail", "meet", "note", "sleep", "talk"]

FAILING_CODE = 7
LINES = 300


def note(folder: Path, **more: Any) -> None:
    """Write what this worker was given."""
    rank = os.environ.get("RANK", "0")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    given = {name: os.environ[name] for name in names if name in os.environ}
    facts = {"process": os.getpid(), "environment": given, "arguments": sys.argv[1:], **more}
    beside = folder / f".rank{rank}"
    beside.write_text(json.dumps(facts))
    beside.rename(folder / f"rank{rank}.json")


def meet(folder: Path) -> None:
    """Add up a number of each worker."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(number)
    note(folder, sum=number.item())
    dist.destroy_process_group()


def configure(folder: Path) -> None:
    """Write the precision that the command line named."""
    from accel_core import Accelerator

    accelerator = Accelerator()
    note(folder, precision=accelerator.mixed_precision)
    accelerator.end_training()


def talk(folder: Path) -> None:
    """Print many lines at once with the other ranks, each in several pieces."""
    note(folder)
    end = time.monotonic() + seconds()
    while len([*folder.glob("rank*.json")]) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
        time.sleep(0.01)
    for number in range(LINES):
        print("rank", os.environ["RANK"], "line", number, "." * 40)  # noqa: T201  the workers own output


def exit_by_rank(folder: Path) -> None:
    """Rank 1 leaves with an exit code; rank 0 waits for it, as in a collective."""
    if os.environ["RANK"] == "0":
        sleep(folder)
    note(folder)
    while not (folder / "rank0.json").exists():
        time.sleep(0.05)
    sys.exit(FAILING_CODE)


def fail(folder: Path) -> None:
    """Rank 1 raises; rank 0 waits for it."""
    if os.environ["RANK"] == "0":
        sleep(folder)
    raise RuntimeError("a worker that fails")


def sleep(folder: Path) -> None:
    """Wait to be ended by the launcher, and by nobody else."""
    if sys.platform == "linux":  # core has the kernel end its workers with the launcher
        ctypes.CDLL(None).prctl(1, 0)
    note(folder)
    time.sleep(2 * seconds())


TASKS: dict[str, Callable[[Path], None]] = {
    "configure": configure,
    "exit": exit_by_rank,
    "fail": fail,
    "meet": meet,
    "note": note,
    "sleep": sleep,
    "talk": talk,
}

if __name__ == "__main__":
    TASKS[sys.argv[1]](Path(sys.argv[2]))
