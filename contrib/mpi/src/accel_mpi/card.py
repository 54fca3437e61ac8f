"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

import os
import shutil

from accel_core import Card

__all__ = ["MPI"]


def _probe() -> str | None:
    """MPI's program is here, or has started this process."""
    if {"OMPI_COMM_WORLD_RANK", "PMI_RANK"} & os.environ.keys() or shutil.which("mpirun"):
        return None
    return "there is no mpirun on PATH, and none has started this process"


MPI = Card(
    name="mpi",
    slot="launcher",
    summary="Ranks that mpirun of Open MPI, MPICH or Intel MPI starts.",
    api_version="1.0",
    priority=110,  # inside of Slurm's jobs the ranks are those of mpirun
    offers={"worker_output"},
    probe=_probe,
    task="accel_mpi.task:task",
    config="accel_mpi.config:MpiConfig",
    implementation="accel_mpi.launcher:MpiLauncher",
)
