"""The command line of mpirun, by the flags of the MPI that is installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import uuid
from pathlib import Path

from accel_core import Job, LaunchError
from accel_mpi.config import MpiConfig

__all__ = ["ADDRESS", "NAME", "mpirun"]

ADDRESS = "ACCEL_MPI_ADDRESS"
"""Variable with the machine of rank 0, for ranks that this command starts."""
NAME = "ACCEL_MPI_JOB"
"""Variable with the name of the job."""


def mpirun(job: Job, config: MpiConfig) -> list[str]:
    """Return the command that runs `accel launch` once per rank.

    Raises:
        LaunchError: there is no mpirun, the hostfile does not name the job's machines, or nobody has said
            how many processes each has.
    """
    program = shutil.which("mpirun")
    if program is None:
        raise LaunchError("there is no mpirun on PATH\ninstall Open MPI or MPICH, or load its module")
    hosts = _hosts(config.hostfile, job.nodes)
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    is_open = "Open MPI" in told.stdout or "open-mpi" in told.stdout
    each = job.processes_per_node
    if not each:
        raise LaunchError(
            "-n auto: this machine cannot count the devices of the hosts on which mpirun starts\n"
            "name the number of processes of each, as in -n 8"
        )
    words = [program, "-n", str(job.nodes * each)]
    if config.hostfile:
        place = ["--hostfile", config.hostfile, "--map-by", f"ppr:{each}:node"]
        words += place if is_open else ["-f", config.hostfile, "-ppn", str(each)]
    variables = {name: text for name, text in os.environ.items() if name.startswith("ACCEL_")}
    variables |= {ADDRESS: hosts[0], NAME: f"mpi-{uuid.uuid4().hex}"}
    if config.ccl_workers:
        variables["CCL_WORKER_COUNT"] = str(config.ccl_workers)
    # The program env carries variables to other machines under every MPI.
    # A rank that launches does not hand on that it is one: the new ranks would call mpirun again.
    words += [*shlex.split(config.options), "env", "-u", "RANK", "-u", "WORLD_SIZE"]
    words += [*(f"{name}={text}" for name, text in variables.items())]
    return [*words, *job.command]


def _hosts(file: str | None, nodes: int) -> list[str]:
    """Return the machines of a hostfile in its order; without one this machine."""
    if file is None:
        if nodes > 1:
            raise LaunchError(
                f"{nodes} nodes were asked for, and no hostfile\nname one with --mpi.hostfile FILE"
            )
        return ["127.0.0.1"]
    try:
        lines = [
            line.partition("#")[0].split() for line in Path(file).read_text(encoding="utf-8").splitlines()
        ]
    except OSError as error:
        raise LaunchError(
            f"mpi.hostfile {file} cannot be read: {error.strerror}\nname another file"
        ) from error
    hosts = list(dict.fromkeys(words[0].partition(":")[0] for words in lines if words))
    if len(hosts) < nodes or not hosts:
        raise LaunchError(
            f"{nodes} nodes were asked for (launch.nodes), and {file} names {len(hosts)}\n"
            "add machines to it, or ask for fewer with --nodes"
        )
    return hosts
