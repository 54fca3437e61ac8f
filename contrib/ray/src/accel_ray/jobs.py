"""Jobs that are handed to Ray's job server."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, Final

from accel_core import Job, LaunchError, SubmittedJob
from accel_ray.config import RayConfig
from accel_ray.place import job_around

__all__ = ["passed_on", "relocated", "request", "sent_folder", "submit"]

STOP_SECONDS: Final = 40
"""Time between the signal of `ray job stop` and SIGKILL; Ray's default is 3."""
FLAGS: Final = 3
"""Place of the first flag behind the interpreter: --config if there is a file."""


def request(job: Job, config: RayConfig) -> dict[str, Any]:
    """Return the arguments of Ray's `submit_job`."""
    words = shlex.join(("python", *relocated(job, config)))
    environment: dict[str, Any] = {
        "env_vars": {**passed_on(job), "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}
    }
    folder = sent_folder(config)
    if folder is not None:
        environment["working_dir"] = str(folder)
    else:
        words = f"cd {shlex.quote(str(Path.cwd()))} && exec {words}"
    return {"entrypoint": words, "runtime_env": environment}


def submit(job: Job, config: RayConfig) -> SubmittedJob:
    """Send the job.

    Raises:
        LaunchError: no job server answers, or it refuses the job.
    """
    from ray.job_submission import JobSubmissionClient

    address = config.address or os.environ.get("RAY_ADDRESS")
    if address and not address.startswith(("http://", "https://")):
        raise LaunchError(
            f"{address} is not the address of a job server of Ray\nname it with --ray.address http://HOST:8265"
        )
    asked = request(job, config)
    try:
        client = JobSubmissionClient(address)
        number = client.submit_job(**asked)
    except Exception as error:  # of Ray, and of the libraries that it sends by
        told = str(error).strip().partition("\n")[0]
        raise LaunchError(
            f"the job server of Ray at {address or 'this machine'} did not take the job: {told}\n"
            "name it with --ray.address http://HOST:8265; `accel submit --dry-run` shows the request"
        ) from error
    where = f"--address {client.get_address()} {number}"
    return SubmittedJob(
        id=number,
        watch=f"ray job status {where}",
        cancel=f"ray job stop {where}",
        logs=f"ray job logs --follow {where}",
    )


def relocated(job: Job, config: RayConfig) -> list[str]:
    """Return the words after the interpreter.

    The config file is named where the sent folder will be.
    """
    words, folder, start = list(job.command[1:]), sent_folder(config), "--config="
    file = Path(words[FLAGS].removeprefix(start))
    if folder is not None and words[FLAGS].startswith(start) and file.is_relative_to(folder):
        words[FLAGS] = f"{start}{file.relative_to(folder)}"
    return words


def sent_folder(config: RayConfig) -> Path | None:
    """Return the folder whose files are sent; None if all nodes have this one.

    Raises:
        LaunchError: there is no such folder.
    """
    told = job_around(os.environ)
    if told is not None:
        return Path.cwd() if "working_dir" in (told.get("runtime_env") or {}) else None
    if config.working_dir is None:
        return None
    if not Path(config.working_dir).is_dir():
        raise LaunchError(f"ray.working_dir {config.working_dir} is not a folder\nname another")
    return Path(config.working_dir).absolute()


def passed_on(job: Job) -> dict[str, str]:
    """Return the variables of this process that go with the job."""
    ours = {*job.environment, "ACCEL_CONFIG"}  # files of this machine; a flag names the config
    return {name: it for name, it in os.environ.items() if name.startswith("ACCEL_") and name not in ours}
