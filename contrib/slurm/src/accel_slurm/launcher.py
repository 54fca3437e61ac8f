"""The launcher: finds the nodes of a step, and sends batch files."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from typing import Any, Final

from attrs import evolve

from accel_core import Allocation, Job, LaunchConfig, LaunchError, SubmittedJob, hooks, implements
from accel_slurm.batch import batch_file
from accel_slurm.config import SlurmConfig
from accel_slurm.step import Step, address_of

__all__ = ["SlurmLauncher"]

SEND: Final = ("sbatch", "--parsable", "--export=ALL")


ANY_TASK: Final = str(2**32 - 2)
"""Slurm's number of the task of an array that has not started."""


class SlurmLauncher:
    """Launcher `slurm`; torchrun below it starts the ranks of a node."""

    below: Any

    def __init__(self, config: SlurmConfig, run: None) -> None:
        self.config = config

    @implements(hooks.allocation)
    def allocation(self, launch: LaunchConfig) -> Allocation | None:
        """Return the nodes of the step.

        None outside of a step of several tasks, and if the user divides the job by --node-rank.
        """
        step = Step.around(os.environ)
        if launch.rendezvous is not None and (step is None or not _agree(step, launch)):
            return None
        if step is None:
            _refuse_lonely_script(launch)
            return None
        _refuse_other_size(step, launch)
        if step.tasks == 1:  # as without Slurm, so that each of several launches has its own id
            return None
        return Allocation(
            job_id=f"slurm-{step.job}.{step.number}",
            nodes=step.tasks,
            node_rank=step.task,
            address=address_of(step.node_list) if step.tasks > 1 else "127.0.0.1",
            processes_per_node=1 if step.starts_ranks else None,
        )

    @implements(hooks.launch)
    def launch(self, job: Job) -> int:
        """Have torchrun start the ranks of this node, or the rank of this task."""
        if "SLURM_JOB_ID" not in os.environ and self.config != SlurmConfig():
            raise LaunchError(
                "options of section slurm are of jobs that are handed over, and"
                " no job of Slurm is around this process\n"
                "use `accel submit`; or, to train on this machine, name --launcher torchrun"
            )
        step = Step.around(os.environ) if job.id else None
        if step is not None and step.starts_ranks:
            variables = {
                "LOCAL_RANK": step.local_task,
                "LOCAL_WORLD_SIZE": step.local_tasks,
                "GROUP_RANK": step.node,
                "GROUP_WORLD_SIZE": step.nodes,
            }
            # torch's agent counts the ranks that it starts itself: one.
            job = evolve(job, argv=("env", *(f"{name}={it}" for name, it in variables.items()), *job.argv))
        code: int = self.below.launch(job)
        return code

    @implements(hooks.preview)
    def preview(self, job: Job, submits: bool) -> str:
        """Return the batch file, below the command that sends it."""
        return f"{shlex.join(SEND)} <<'END'\n{batch_file(job, self.config)}END" if submits else ""

    @implements(hooks.submit)
    def submit(self, job: Job) -> SubmittedJob:
        """Send the batch file."""
        if shutil.which("sbatch") is None:
            raise LaunchError("there is no sbatch on PATH\nsubmit from a machine with Slurm's programs")
        text = batch_file(job, self.config)
        # A rank that hands a job over does not hand on that it is one.
        environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        sent = subprocess.run(  # noqa: S603  fixed words
            SEND, input=text, env=environment, capture_output=True, text=True, check=False
        )
        number, _, cluster = sent.stdout.strip().partition(";")  # a job of another cluster: number;cluster
        if not number.isdecimal():
            raise LaunchError(
                f"sbatch refused the job: {(sent.stderr or sent.stdout).strip()}\n"
                "change slurm.options or launch.nodes; `accel submit --dry-run` shows the batch file"
            )
        # Without its cluster the number is that of another job here.
        where = f"--clusters={cluster} " if cluster else ""
        return SubmittedJob(
            id=number,
            watch=f"squeue {where}--jobs {number}",
            cancel=f"scancel {where}{number}",
            logs=_output_of(number, cluster),
        )


def _refuse_lonely_script(launch: LaunchConfig) -> None:
    """Refuse to run once in a job of several nodes."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_JOB_ID" in os.environ and nodes != "1":
        raise LaunchError(
            f"job {os.environ['SLURM_JOB_ID']} of Slurm has {nodes} nodes, and this process runs on one of"
            " them, outside of a step\n"
            "start it on each node with `srun --ntasks-per-node=1 accel launch ...`; or, if training here"
            " alone is meant, name --launcher torchrun"
        )


def _agree(step: Step, launch: LaunchConfig) -> bool:
    """Return True if the user names no other nodes than the step has."""
    return step.tasks > 1 and launch.nodes in (1, step.nodes) and launch.node_rank in (0, step.task)


def _refuse_other_size(step: Step, launch: LaunchConfig) -> None:
    """Refuse a step that has other nodes or tasks than were asked for."""
    found = f"step {step.job}.{step.number} of Slurm has"
    least = launch.min_nodes or launch.nodes
    if launch.nodes > 1 and not least <= step.nodes <= launch.nodes:
        asked = f"{least} to {launch.nodes}" if least != launch.nodes else f"{launch.nodes}"
        raise LaunchError(
            f"{asked} nodes were asked for (launch.nodes), and {found} {step.nodes}: {step.node_list}\n"
            f"give sbatch, salloc or srun --nodes={launch.nodes}, or leave launch.nodes out"
        )
    if not step.starts_ranks:
        return
    if launch.processes_per_node not in ("auto", step.local_tasks):
        raise LaunchError(
            f"{launch.processes_per_node} processes per node were asked for, and {found} {step.local_tasks}"
            " tasks on this one\n"
            "leave out launch.processes_per_node to train on Slurm's tasks, or give srun --ntasks-per-node=1"
        )


def _output_of(number: str, cluster: str) -> str:
    """Return the file that the job writes; empty if Slurm does not tell."""
    if shutil.which("scontrol") is None:
        return ""
    where = [f"--clusters={cluster}"] if cluster else []
    command = ["scontrol", *where, "--oneliner", "show", "job", number]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603  Slurm's own number
    found = re.search(r"\bStdOut=(\S+)", told)
    return found[1].replace(ANY_TASK, "*") if found else ""
