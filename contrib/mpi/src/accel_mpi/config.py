"""Options of `accel launch --launcher mpi`."""

from __future__ import annotations

import shlex

from attrs import frozen

from accel_core import option

__all__ = ["MpiConfig"]


@frozen(kw_only=True)
class MpiConfig:
    """Jobs that mpirun starts. Section `mpi`."""

    hostfile: str | None = option(
        None, help="File that names a machine per line, that of rank 0 first; unset: this machine alone."
    )
    ccl_workers: int | None = option(
        None, minimum=1, help="CCL_WORKER_COUNT of the ranks: threads of Intel's oneCCL per rank."
    )
    options: str = option("", help="More options of mpirun, as on its command line: --bind-to none.")

    def __attrs_post_init__(self) -> None:
        words = shlex.split(self.options)
        if words and not words[0].startswith("-"):
            raise ValueError(f"options {self.options!r} are not options; write --bind-to none")
