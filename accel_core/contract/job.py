"""A job: the workers that a launcher starts, and the machines on which they run."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen


@frozen(kw_only=True)
class Job:
    """The workers that a launcher starts. Picklable."""

    argv: tuple[str, ...]
    """The command of one worker, interpreter included.

    It runs once per rank, with torchrun's variables and the variables in `environment`. Empty in `submit`,
    and in the `preview` of `submit`: such a job runs `command`.
    """
    command: tuple[str, ...] = ()
    """`accel launch` with the flags and the script, to run on other machines."""
    nodes: int = 1
    node_rank: int = 0
    processes_per_node: int = 1
    """Workers on each node; 0: counted on the node itself.

    The value is 0 in `submit`, and if `Allocation.elsewhere` is set.
    """
    rendezvous: str | None = None
    """host:port of node 0; None on a single node (a free port of 127.0.0.1 is taken)."""
    id: str = ""
    """Name that no other running job has; "" if nodes need no name to meet."""
    max_restarts: int = 0
    min_nodes: int | None = None
    """Number of nodes to start with, or to go on with after losing some; None: all."""
    log_dir: str | None = None
    """Folder for the output of workers: files for each rank and attempt."""
    tee: str = "none"
    """Workers whose lines are printed after their rank: none, main (rank 0) or all."""
    environment: Mapping[str, str] = field(factory=dict)
    """Variables that each worker gets on top of this process's environment."""


@frozen(kw_only=True)
class Allocation:
    """The machines that an engine has given to a job, and this process's place."""

    job_id: str
    """Name that no other running job has; also ACCEL_RUN_ID, if the user sets none."""
    nodes: int
    """Number of launchers that meet: one per machine, or one per rank."""
    node_rank: int
    address: str
    """Host name or address of node 0, for all nodes."""
    processes_per_node: int | None = None
    """Workers of each launcher, if settled: 1 if the engine starts a task per rank."""
    elsewhere: bool = False
    """True if the launcher starts workers on other machines: this machine's devices do not count then."""


@frozen(kw_only=True)
class SubmittedJob:
    """A job that an engine has taken."""

    id: str
    watch: str
    """The engine's own command that shows the state of the job."""
    cancel: str
    """The engine's own command that ends the job."""
    logs: str = ""
    """File or command with the output of the job, if it is known."""
