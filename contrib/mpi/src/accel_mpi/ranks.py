"""This process's place among the ranks of mpirun, read from its variables.

Sources: https://docs.open-mpi.org (environment variables of launched processes); hydra's PMI_RANK, PMI_SIZE,
MPI_LOCALRANKID and MPI_LOCALNRANKS, which Intel MPI and MVAPICH took over from MPICH.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from accel_core import LaunchError
from accel_mpi.task import is_slurms

__all__ = ["Ranks", "starter"]

OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Variables with a name of the job that no other mpirun of this machine has."""


@frozen(kw_only=True)
class Ranks:
    """A rank's place."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str
    """Name of the job; empty if MPI tells none."""

    @classmethod
    def around(cls, variables: Mapping[str, str]) -> Ranks | None:
        """Return the place of this process; None if no mpirun has started it.

        Raises:
            LaunchError: MPI tells the rank, and not how many there are on this machine.
        """
        names = next((names for names in (OPEN_MPI, HYDRA) if names[0] in variables), None)
        if names is None or is_slurms(variables):
            return None
        if variables[names[0]] == "0" and variables.get(names[1], "1") == "1" and names[3] not in variables:
            return None  # left over in a shell, or of a library that started itself: nothing tells of others
        told = {name: variables.get(name, "") for name in names}
        wrong = [name for name, text in told.items() if not text.isdecimal()]
        wrong += [name for name in names[1::2] if not wrong and not int(told[name])]  # sizes
        if wrong:
            found = f"is {told[wrong[0]]!r}" if wrong[0] in variables else "is not"
            raise LaunchError(
                f"{names[0]} is set as by mpirun, and {wrong[0]} {found}\n"
                "start the ranks with mpirun of Open MPI, MPICH or Intel MPI, or unset " + names[0]
            )
        rank, size, local_rank, local_size = (int(text) for text in told.values())
        job = next((variables[name] for name in JOBS if name in variables), "")
        return cls(rank=rank, size=size, local_rank=local_rank, local_size=local_size, job=job)

    @property
    def machines(self) -> int:
        """Return the number of machines, which have as many ranks as this one."""
        return -(-self.size // self.local_size)


def starter() -> int:
    """Return the number of hydra's process that started this machine's ranks.

    Scripts may stand between it and this process, and have the rank's variable too.
    """
    process, variable = os.getppid(), f"\0{HYDRA[0]}=".encode()
    with suppress(OSError):  # there is no /proc, or it is another user's process
        while variable in b"\0" + Path(f"/proc/{process}/environ").read_bytes():
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process
