"""The launcher: nodes of a Ray cluster here and now, or its job server."""

from __future__ import annotations

import json
import os
import shlex
import sys
import uuid
from pathlib import Path
from typing import Any

from accel_core import Allocation, Job, LaunchConfig, LaunchError, SubmittedJob, hooks, implements
from accel_ray.config import RayConfig
from accel_ray.place import PLACE, Place, job_around

__all__ = ["RayLauncher"]


class RayLauncher:
    """Launcher `ray`; torchrun below it starts the ranks of a node."""

    below: Any

    def __init__(self, config: RayConfig, run: None) -> None:
        self.config = config

    @implements(hooks.allocation)
    def allocation(self, launch: LaunchConfig) -> Allocation | None:
        """Return this node's place, or nodes elsewhere.

        These in a job of Ray, or where launcher ray is named. None otherwise, and if the user divides the
        job by --rendezvous.
        """
        place, automatic = Place.around(os.environ), launch.processes_per_node == "auto"
        if place is not None:
            return Allocation(
                job_id=place.job,
                nodes=place.nodes,
                node_rank=place.node,
                address=place.address,
                processes_per_node=place.processes if automatic else None,
            )
        told = job_around(os.environ)
        if launch.rendezvous is not None or (told is None and launch.launcher != "ray"):
            return None
        number = ((told or {}).get("metadata") or {}).get("job_submission_id")
        return Allocation(
            job_id=f"ray-{number or uuid.uuid4().hex}",
            nodes=launch.nodes,
            node_rank=launch.node_rank,
            address="127.0.0.1",  # nobody meets here: each attempt has an address
            elsewhere=True,
        )

    @implements(hooks.launch)
    def launch(self, job: Job) -> int:
        """Have torchrun start the ranks of this node, or actors start all nodes."""
        if PLACE in os.environ and job.id:
            below: int = self.below.launch(job)
            return below
        _refuse(job)
        from accel_ray.attempt import NodeLost
        from accel_ray.cluster import connected, counted, needed
        from accel_ray.jobs import relocated, sent_folder

        # Read before there are actors: two nodes on one machine replace the folder that was sent.
        words = relocated(job, self.config)
        folder = str(Path.cwd()) if sent_folder(self.config) is None else None
        with connected(self.config):
            job, name = counted(job, self.config), job.id or f"ray-{uuid.uuid4().hex}"
            each = needed(job, self.config)
            for attempt in range(job.max_restarts + 1):
                try:
                    this = f"{name}-{attempt}" if attempt else name
                    return self._attempt(job, each, (words, folder), this, name)
                except NodeLost as lost:
                    if attempt == job.max_restarts:
                        raise LaunchError(
                            f"{lost}\nwith --max-restarts 3 the job starts again, from its last checkpoint,"
                            " where the cluster has another node"
                        ) from lost
                    sys.stderr.write(f"accel: {lost}; restart {attempt + 1} of {job.max_restarts}\n")
        raise AssertionError

    @implements(hooks.preview)
    def preview(self, job: Job, submits: bool) -> str:
        """Return the request to the job server, or what runs on each node."""
        from accel_ray.jobs import relocated, request, sent_folder

        if PLACE in os.environ and job.id:
            return ""
        if submits:
            return json.dumps(request(job, self.config), indent=2)
        gpus, processes = self.config.gpus_per_process, job.processes_per_node or "auto"
        each = f"{self.config.cpus_per_process} CPU and "
        each += "1 GPU if the cluster has any" if gpus is None else f"{gpus} GPU"
        words = shlex.join(("python", *relocated(job, self.config)))
        where = Path.cwd() if sent_folder(self.config) is None else "the folder that is sent"
        count = f"{job.nodes} node{'s' * (job.nodes > 1)} of Ray x {processes} processes"
        return f"{count}, each with {each}; on each node, in {where}:\n{words}"

    @implements(hooks.submit)
    def submit(self, job: Job) -> SubmittedJob:
        """Send the job to Ray's job server."""
        from accel_ray.jobs import submit

        return submit(job, self.config)

    def _attempt(
        self, job: Job, each: dict[str, int], command: tuple[list[str], str | None], name: str, run: str
    ) -> int:
        """Reserve the nodes and run `accel launch`, in its folder, on each."""
        from accel_ray.attempt import Attempt
        from accel_ray.cluster import reserved
        from accel_ray.jobs import passed_on

        with reserved(job.nodes, each, self.config) as group, Attempt.on(group, each) as attempt:
            threads = {"OMP_NUM_THREADS": str(self.config.cpus_per_process)}  # Ray sets the actor's number
            given = {"ACCEL_RUN_ID": run} | passed_on(job) | threads
            places = [
                Place(
                    job=name,
                    nodes=job.nodes,
                    node=node,
                    address=attempt.addresses[0],
                    processes=job.processes_per_node,
                )
                for node in range(job.nodes)
            ]
            variables = [{**given, PLACE: place.told()} for place in places]
            return attempt.run(command[0], variables, command[1])


def _refuse(job: Job) -> None:
    """Refuse settings of launchers that start one node."""
    if job.min_nodes is not None:
        raise LaunchError(
            "launch.min_nodes: launcher ray starts a job again on all its nodes, and not on fewer\n"
            "leave it out; --max-restarts 3 restarts after the loss of a node"
        )
    if job.node_rank or (job.rendezvous and not job.id):
        raise LaunchError(
            "launch.node_rank and launch.rendezvous: launcher ray starts all nodes, and numbers them\n"
            "leave them out, or name --launcher torchrun"
        )
