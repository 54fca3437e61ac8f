"""The step of Slurm that this process is a task of, read from its variables.

Only variables of the step are read. SLURM_NNODES and SLURM_NODELIST are the job's in a batch script, and the
step's inside of a step; SLURM_LAUNCH_NODE_IPADDR is the machine where srun was typed.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from typing import Final

from attrs import frozen

from accel_core import LaunchError
from accel_slurm.hostlist import expand
from accel_slurm.task import counts

__all__ = ["Step", "address_of"]

NUMBERS: Final = (
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_LOCALID",
)
"""Variables of every task of a step."""


@frozen(kw_only=True)
class Step:
    """A task's place in its step."""

    job: str
    number: str
    task: int
    tasks: int
    node: int
    nodes: int
    node_list: str
    local_task: int
    tasks_per_node: tuple[int, ...]

    @classmethod
    def around(cls, variables: Mapping[str, str]) -> Step | None:
        """Return the step around this process; None outside of a step.

        Raises:
            LaunchError: some variables of a step are there, and others are not, or are not numbers.
        """
        if "SLURM_JOB_ID" not in variables or "SLURM_STEP_NODELIST" not in variables:
            return None
        wrong = next((name for name in NUMBERS if not variables.get(name, "").isdecimal()), None)
        per_node = counts(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
        if not wrong and int(variables["SLURM_NODEID"]) >= len(per_node):
            wrong = "SLURM_STEP_TASKS_PER_NODE"
        if wrong:
            found = f"is {variables[wrong]!r}" if wrong in variables else "is not set"
            raise LaunchError(
                f"SLURM_STEP_NODELIST is set as in a step of Slurm, and {wrong} {found}\n"
                "start this with srun; or, if no step is around it, name --launcher torchrun"
            )
        return cls(
            job=variables["SLURM_JOB_ID"],
            number=variables["SLURM_STEP_ID"],
            task=int(variables["SLURM_PROCID"]),
            tasks=int(variables["SLURM_STEP_NUM_TASKS"]),
            node=int(variables["SLURM_NODEID"]),
            nodes=int(variables["SLURM_STEP_NUM_NODES"]),
            node_list=variables["SLURM_STEP_NODELIST"],
            local_task=int(variables["SLURM_LOCALID"]),
            tasks_per_node=per_node,
        )

    @property
    def starts_ranks(self) -> bool:
        """Return True if Slurm has started a task per rank, and not one per node."""
        return self.tasks > self.nodes

    @property
    def local_tasks(self) -> int:
        """Return the number of tasks on this node."""
        return self.tasks_per_node[self.node]


def address_of(node_list: str) -> str:
    """Return the first node's name, or the address that Slurm has for it.

    Raises:
        LaunchError: neither is known here.
    """
    name = expand(node_list)[0]
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        told = _told_by_slurm(name)
        if told is None:
            raise LaunchError(
                f"this machine does not know {name!r}, the first node of {node_list}, and Slurm tells no"
                " address\nname a place with --rendezvous HOST:PORT, an address of that node"
            ) from None
        return told
    return name


def _told_by_slurm(name: str) -> str | None:
    if shutil.which("scontrol") is None:
        return None
    command = ["scontrol", "--oneliner", "show", "node", name]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603  node names are Slurm's own
    found = re.search(r"\bNodeAddr=(\S+)", answer)
    return found[1] if found and found[1] != name else None
