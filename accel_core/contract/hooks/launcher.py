# mypy: disable-error-code="empty-body"
"""The hooks of launchers, which run before the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core.contract.spec import spec

if TYPE_CHECKING:
    from accel_core.contract.config import LaunchConfig
    from accel_core.contract.job import Allocation, Job, SubmittedJob


@spec("owner")
def launch(job: Job) -> int:
    """Start the job's workers, wait, and return the exit code.

    Launchers only. The exit code is the code of the first rank that fails, which is reported once. Workers'
    output appears as it comes, in whole lines. SIGINT and SIGTERM end all workers. `accel launch` runs on
    each node, unless the launcher starts it there.
    """


@spec("owner")
def allocation(launch: LaunchConfig) -> Allocation | None:
    """Return the machines that the launcher's engine has given to this process; None outside of a job.

    Launchers only; `launcher: auto` takes the first launcher that returns an allocation. A launcher that is
    named, and starts workers on other machines, returns an allocation with `elsewhere=True`. Raises
    LaunchError if `launch` asks for other machines.
    """


@spec("owner")
def submit(job: Job) -> SubmittedJob:
    """Hand `job.command` to an engine that runs it later, and return at once.

    Launchers only.
    """


@spec("owner")
def preview(job: Job, submits: bool) -> str:
    """Return the commands and files of `submit`, or else of `launch`, as text.

    Launchers only, for `--dry-run`: nothing is started or sent.
    """
