"""Options of the launcher `ray`."""

from __future__ import annotations

from attrs import frozen

from accel_core import option

__all__ = ["RayConfig"]


@frozen(kw_only=True)
class RayConfig:
    """Jobs on the nodes of a Ray cluster. Section `ray`."""

    address: str | None = option(
        None,
        help="HOST:PORT of the cluster, or http://HOST:PORT of its job server for accel submit; unset:"
        " RAY_ADDRESS, else the cluster that this machine is part of. Unused inside a job of Ray.",
    )
    working_dir: str | None = option(
        None,
        help="Folder that is sent to each node, where the script starts; unset: all nodes have this one.",
    )
    cpus_per_process: int = option(
        1, minimum=1, help="CPUs that each process reserves; also its OMP_NUM_THREADS."
    )
    gpus_per_process: int | None = option(
        None, minimum=0, help="GPUs that each process reserves; unset: 1 if the cluster has any."
    )
    wait_seconds: int = option(
        0, minimum=0, unit="s", help="Time to wait for nodes that are busy, lost, or yet to be started."
    )
