"""The launcher: finds the pods of a job, and sends manifests."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from typing import Any, Final

from accel_core import Allocation, Job, LaunchConfig, LaunchError, SubmittedJob, hooks, implements
from accel_kubernetes.config import KubernetesConfig
from accel_kubernetes.manifest import manifest
from accel_kubernetes.pod import NODES, PROCESSES, Pod

__all__ = ["KubernetesLauncher"]

SEND: Final = ("kubectl", "create", "--filename=-", "--output=name")


class KubernetesLauncher:
    """Launcher `kubernetes`; torchrun below it starts the ranks of a pod."""

    below: Any

    def __init__(self, config: KubernetesConfig, run: None) -> None:
        self.config = config

    @implements(hooks.allocation)
    def allocation(self, launch: LaunchConfig) -> Allocation | None:
        """Return the pods of the job.

        None outside of a job of several pods, and if the user names the place where nodes meet.
        """
        pod = Pod.around(os.environ)
        if pod is None or launch.rendezvous is not None:
            return None
        _refuse_other_size(pod, launch)
        if pod.nodes == 1:
            return None
        return Allocation(
            job_id=f"kubernetes-{pod.address}", nodes=pod.nodes, node_rank=pod.rank, address=pod.address
        )

    @implements(hooks.launch)
    def launch(self, job: Job) -> int:
        """Have torchrun start the ranks of this pod."""
        if "KUBERNETES_SERVICE_HOST" not in os.environ and self.config != KubernetesConfig():
            raise LaunchError(
                "options of section kubernetes are of jobs that are handed over, and"
                " this process is in no pod\n"
                "use `accel submit`; or, to train on this machine, name --launcher torchrun"
            )
        pod = Pod.around(os.environ)
        if pod is not None and pod.processes not in (None, job.processes_per_node) and pod.rank == 0:
            sys.stderr.write(
                f"accel: {PROCESSES} is {pod.processes}, and each pod starts {job.processes_per_node}: the"
                f" number of its devices, or that asked for; -n {pod.processes} starts as many\n"
            )
        code: int = self.below.launch(job)
        return code

    @implements(hooks.preview)
    def preview(self, job: Job, submits: bool) -> str:
        """Return the manifest, below the command that sends it."""
        return f"{shlex.join(self._words(*SEND))} <<'END'\n{manifest(job, self.config)}END" if submits else ""

    @implements(hooks.submit)
    def submit(self, job: Job) -> SubmittedJob:
        """Send the manifest."""
        text = manifest(job, self.config)
        if shutil.which(SEND[0]) is None:
            raise LaunchError(
                "there is no kubectl on PATH\ninstall it, or send what `accel submit --dry-run` shows from a"
                " machine that has it"
            )
        sent = subprocess.run(  # noqa: S603  the user's own words
            self._words(*SEND), input=text, capture_output=True, text=True, check=False
        )
        if sent.returncode:
            raise LaunchError(
                f"kubectl refused the job: {sent.stderr.strip()}\n"
                "change the options of section kubernetes; `accel submit --dry-run` shows the manifest"
            )
        resource = sent.stdout.strip()
        selector = f"--selector=jobset.sigs.k8s.io/jobset-name={resource.rpartition('/')[2]}"
        logs = ("kubectl", "logs", "--follow", "--prefix", "--tail=-1", selector)
        return SubmittedJob(
            id=resource,
            watch=shlex.join(self._words("kubectl", "get", resource, "--watch")),
            cancel=shlex.join(self._words("kubectl", "delete", resource)),
            logs=shlex.join(self._words(*logs, f"--max-log-requests={job.nodes}")),
        )

    def _words(self, *command: str) -> list[str]:
        return [*command, *shlex.split(self.config.options)]


def _refuse_other_size(pod: Pod, launch: LaunchConfig) -> None:
    least = launch.min_nodes or launch.nodes
    if launch.nodes > 1 and not least <= pod.nodes <= launch.nodes:
        asked = f"{least} to {launch.nodes}" if least != launch.nodes else f"{launch.nodes}"
        raise LaunchError(
            f"{asked} nodes were asked for (launch.nodes), and this job has {pod.nodes} pods ({NODES})\n"
            f"give the job as many pods, or leave launch.nodes out"
        )
