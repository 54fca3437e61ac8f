"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

import os
import shutil

from accel_core import Card

__all__ = ["SLURM"]


def _probe() -> str | None:
    """Slurm's programs are here, or this process is part of a job."""
    if "SLURM_JOB_ID" in os.environ or shutil.which("sbatch"):
        return None
    return "there is no sbatch on PATH, and no job of Slurm around this process"


SLURM = Card(
    name="slurm",
    slot="launcher",
    summary="Nodes of a Slurm job, and jobs handed over by sbatch.",
    api_version="1.0",
    priority=100,
    offers={"worker_output"},
    probe=_probe,
    task="accel_slurm.task:task",
    config="accel_slurm.config:SlurmConfig",
    implementation="accel_slurm.launcher:SlurmLauncher",
)
