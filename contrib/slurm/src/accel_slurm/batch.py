"""The batch file of a job: `accel launch` on each node, and the queue again."""

from __future__ import annotations

import shlex
from pathlib import Path

from accel_core import Job
from accel_slurm.config import SlurmConfig

__all__ = ["batch_file"]

RUN = """
# It hands signals on to the ranks, and its code is the greatest of the nodes.
srun {command} &
step=$!
"""
WAIT = """again=yes
while [ -n "$again" ]; do
  again=
  wait "$step"
  code=$?
done
"""
WARNED = """
# Slurm tells this script before the time limit; the ranks save, and end by themselves.
warned= again=
export ACCEL_STOP_FILE=$(mktemp)
trap 'warned=yes again=yes; kill -s USR1 "$step"' USR1
"""
ENDED = """
# The ranks say `watching` if their loop was at its end before they came to stop.
stopped=$(cat "$ACCEL_STOP_FILE")
rm -f "$ACCEL_STOP_FILE"
"""
REQUEUE = """
if [ -n "$warned" ] && [ "$code" = 0 ] && [ "$stopped" != watching ]; then
  echo "accel: ended well, told of the time limit; job $SLURM_JOB_ID goes into the queue again" >&2
  exec scontrol requeue "$SLURM_JOB_ID"
fi
"""
PREEMPTED = """
# Slurm queues a preempted job again if it kills it, and not one that saves and ends in the grace time.
if [ "$code" != 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
  echo "accel: preempted; job $SLURM_JOB_ID goes into the queue again" >&2
  exec scontrol requeue "$SLURM_JOB_ID"
fi
"""
FAILED = """
if [ -n "$warned" ] && [ "$code" != 0 ]; then
  echo "accel: job $SLURM_JOB_ID was told to save before the time limit, and ended with code $code" >&2
fi
"""


def batch_file(job: Job, config: SlurmConfig) -> str:
    """Return the text that sbatch is given."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={_name(job)}",
        f"#SBATCH --nodes={job.nodes}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --open-mode=append",
        f"#SBATCH --{'requeue' if config.requeue else 'no-requeue'}",
    ]
    if config.warning_seconds:
        lines.append(f"#SBATCH --signal=B:USR1@{config.warning_seconds}")
    if config.options:
        # Plain, # would begin a comment; a backslash escapes inside of quotes too.
        words = shlex.join(shlex.split(config.options)).replace("\\", "\\\\")
        lines.append(f"#SBATCH {words}")
    lines += ["", "# Since Slurm 22.05 srun does not take this from sbatch by itself."]
    lines.append('if [ -n "$SLURM_CPUS_PER_TASK" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi')
    parts = [WARNED if config.warning_seconds else "", RUN.format(command=shlex.join(job.command)), WAIT]
    parts.append(ENDED if config.warning_seconds else "")
    parts.append(REQUEUE if config.warning_seconds and config.requeue else "")
    parts.append(PREEMPTED if config.requeue else "")
    parts.append(FAILED if config.warning_seconds else "")
    return "\n".join(lines) + "\n" + "".join(parts) + 'exit "$code"\n'


def _name(job: Job) -> str:
    """Return the name of the script or the module, in letters that Slurm takes."""
    words = [word for word in job.command[4:] if not word.startswith("-")]
    name = Path(words[0]).stem if words else "accel"
    return "".join(letter if letter.isalnum() else "-" for letter in name)
