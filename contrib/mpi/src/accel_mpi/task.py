"""The rank of mpirun, or of a starter with MPI's variables, that this process is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from accel_core import Task

__all__ = ["is_slurms", "task"]

SIZES: Final = (
    "OMPI_COMM_WORLD_SIZE",  # Open MPI
    "PMI_SIZE",  # MPICH, Intel MPI
    "MV2_COMM_WORLD_SIZE",  # MVAPICH2
    "JSM_NAMESPACE_SIZE",  # jsrun
)
RANKS: Final = ("PMIX_RANK", "PALS_RANKID")
"""Variables of starters that do not count the ranks."""
LOCAL_RANKS: Final = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
LOCAL_SIZES: Final = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def task(variables: Mapping[str, str]) -> Task | None:
    """Return the rank that MPI's starter started this process as; None if none did."""
    numbers = {name: int(text) for name, text in variables.items() if text.isdecimal()}
    size = next((name for name in SIZES if numbers.get(name, 0) > 1), None)
    rank = next((name for name in RANKS if name in numbers), None)
    local_rank, local_size = (
        next((numbers[name] for name in names if name in numbers), None)
        for names in (LOCAL_RANKS, LOCAL_SIZES)
    )
    if is_slurms(variables) or (size, rank, local_rank, local_size) == (None, None, None, None):
        return None
    return Task(
        size=numbers[size] if size else 0,
        rank=numbers[rank] if rank else 0,
        local_rank=local_rank,
        local_size=local_size,
        variable=size or rank or "",
    )


def is_slurms(variables: Mapping[str, str]) -> bool:
    """Return True for variables that srun sets for MPI's library."""
    pairs = (
        ("PMI_RANK", "SLURM_PROCID"),
        ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
        ("PMIX_RANK", "SLURM_PROCID"),
    )
    told = [(inner, outer) for inner, outer in pairs if inner in variables]
    return (
        SIZES[0] not in variables
        and bool(told)
        and all(variables[inner] == variables.get(outer) for inner, outer in told)
    )
