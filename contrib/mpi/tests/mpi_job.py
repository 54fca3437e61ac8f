"""The scripts of tests: `mpi_job.py TASK FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CCL_WORKER_COUNT")


def write(folder: Path, **more: object) -> None:
    facts = {name: os.environ.get(name) for name in VARIABLES}
    file = folder / f"rank{os.environ['RANK']}.json"
    file.write_text(json.dumps({**facts, **more, "process": os.getpid()}))


def meet(folder: Path) -> None:
    """Add up the ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor(dist.get_rank())
    dist.all_reduce(number)
    write(folder, sum=number.item())
    dist.destroy_process_group()


def fail(folder: Path) -> None:
    """Rank 0 raises once the other has begun, which waits to be ended."""
    write(folder)
    while not (folder / "rank1.json").exists():
        time.sleep(0.05)
    if os.environ["RANK"] == "0":
        sys.exit(7)
    time.sleep(120)


if __name__ == "__main__":
    {"meet": meet, "fail": fail, "write": write}[sys.argv[1]](Path(sys.argv[2]))
