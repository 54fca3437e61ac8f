"""The launcher: is one of mpirun's ranks, or calls mpirun."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attrs import evolve

from accel_core import Allocation, Job, LaunchConfig, LaunchError, hooks, implements
from accel_mpi.command import ADDRESS, NAME, mpirun
from accel_mpi.config import MpiConfig
from accel_mpi.ranks import Ranks, starter

__all__ = ["MpiLauncher"]

PASSED_ON = ("SIGTERM", "SIGHUP", "SIGUSR1")
ENDING_SECONDS = 30


class MpiLauncher:
    """Launcher `mpi`; torchrun below it watches the rank of this process."""

    below: Any

    def __init__(self, config: MpiConfig, run: None) -> None:
        self.config = config

    @implements(hooks.allocation)
    def allocation(self, launch: LaunchConfig) -> Allocation | None:
        """Return the ranks that mpirun has started.

        None outside of it, unless mpirun is to start them on several machines.
        """
        ranks = Ranks.around(os.environ)
        if ranks is None and launch.launcher == "mpi" and launch.nodes > 1:
            return Allocation(
                job_id=f"mpi-{uuid.uuid4().hex}",
                nodes=launch.nodes,
                node_rank=launch.node_rank,
                address="127.0.0.1",  # nobody meets here: mpirun's ranks have an address
                elsewhere=True,
            )
        if ranks is None or _wraps(ranks, launch):
            return None
        _refuse_other_size(ranks, launch)
        return Allocation(
            job_id=os.environ.get(NAME) or _name(ranks, launch),
            nodes=ranks.size,
            node_rank=ranks.rank,
            address=_address(ranks, launch),
            processes_per_node=1,
        )

    @implements(hooks.launch)
    def launch(self, job: Job) -> int:
        """Run the rank of this process, or have mpirun run all of them."""
        ranks = Ranks.around(os.environ) if job.id else None
        if ranks is None:
            return _run(mpirun(job, self.config))
        variables = {
            "LOCAL_RANK": ranks.local_rank,
            "LOCAL_WORLD_SIZE": ranks.local_size,
            "GROUP_RANK": ranks.rank // ranks.local_size,
            "GROUP_WORLD_SIZE": ranks.machines,
        }
        # torch's agent counts the ranks that it starts itself: one.
        mine = evolve(job, argv=("env", *(f"{name}={it}" for name, it in variables.items()), *job.argv))
        code: int = self.below.launch(mine)
        return code

    @implements(hooks.preview)
    def preview(self, job: Job, submits: bool) -> str:
        """Return the command line of mpirun; inside of mpirun nothing."""
        return "" if submits or Ranks.around(os.environ) else shlex.join(mpirun(job, self.config))


def _wraps(ranks: Ranks, launch: LaunchConfig) -> bool:
    """Return True for one rank that is to have several processes: torchrun's."""
    return ranks.size == 1 and launch.processes_per_node not in ("auto", 1)


def _refuse_other_size(ranks: Ranks, launch: LaunchConfig) -> None:
    asked = {"launch.nodes": launch.nodes if launch.nodes > 1 else "auto"}
    asked["launch.processes_per_node"] = launch.processes_per_node
    found = {"launch.nodes": ranks.machines, "launch.processes_per_node": ranks.local_size}
    for option, number in asked.items():
        if number not in ("auto", found[option]):
            raise LaunchError(
                f"{option} {number} was asked for, and mpirun has started {ranks.size} ranks,"
                f" {ranks.local_size} of them on this machine\n"
                f"leave {option} out, or give mpirun the same numbers"
            )


def _name(ranks: Ranks, launch: LaunchConfig) -> str:
    """Return a name that all ranks of the job know."""
    here = ranks.local_size == ranks.size
    return f"mpi-{ranks.job or (starter() if here else launch.rendezvous)}"


def _address(ranks: Ranks, launch: LaunchConfig) -> str:
    """Return an address of rank 0's machine."""
    if ranks.local_size == ranks.size:
        return "127.0.0.1"
    if launch.rendezvous is not None:
        return launch.rendezvous.rpartition(":")[0]
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    raise LaunchError(
        f"mpirun has started {ranks.size} ranks on {ranks.machines} machines, and tells none where rank 0"
        " is\n"
        "add --rendezvous HOST:PORT, an address of that machine and a free port there; or have accel call"
        " mpirun: accel launch --launcher mpi --mpi.hostfile FILE"
    )


def _run(command: list[str]) -> int:
    """Run mpirun; signals to this process go to it, and it ends its ranks."""
    # In a step of Slurm it starts its own by srun, which would wait for the CPUs of that step.
    environment = {"SLURM_OVERLAP": "1", **os.environ}
    with subprocess.Popen(command, env=environment) as process, _passed_on(process):  # noqa: S603  the user's own words
        try:
            code = process.wait()
        except KeyboardInterrupt:  # mpirun has it from the terminal too, or gets it here
            process.send_signal(signal.SIGINT)
            try:
                process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            return 128 + signal.SIGINT
    return code if code >= 0 else 128 - code


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    numbers = [number for number in signal.Signals if number.name in PASSED_ON]
    before = {number: signal.signal(number, lambda got, _: process.send_signal(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
