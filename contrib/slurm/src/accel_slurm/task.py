"""The task of a step that this process is, whether or not a launcher runs in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from accel_core import Task

__all__ = ["counts", "task"]

SIZE: Final = "SLURM_STEP_NUM_TASKS"
"""Of a step. SLURM_NTASKS is the job's, in its batch script too, which runs once."""


def task(variables: Mapping[str, str]) -> Task | None:
    """Return the task that Slurm started this process as; None if it did not."""
    numbers = {name: int(text) for name, text in variables.items() if text.isdecimal()}
    if "SLURM_PROCID" not in numbers and "SLURM_LOCALID" not in numbers and SIZE not in numbers:
        return None
    size, node = numbers.get(SIZE, 0), numbers.get("SLURM_NODEID", 0)
    per_node = counts(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return Task(
        size=size,
        rank=numbers.get("SLURM_PROCID", 0),
        local_rank=numbers.get("SLURM_LOCALID"),
        local_size=per_node[node] if node < len(per_node) else numbers.get("SLURM_NTASKS_PER_NODE"),
        variable=SIZE if size > 1 else "SLURM_PROCID",
    )


def counts(listed: str) -> tuple[int, ...]:
    """Return the numbers of `2(x3),1`: 2, 2, 2, 1."""
    entries = re.findall(r"(\d+)(?:\(x(\d+)\))?", listed)
    return tuple(int(count) for count, times in entries for _ in range(int(times or 1)))
