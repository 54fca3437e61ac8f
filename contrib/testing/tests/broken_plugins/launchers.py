"""Launchers that break one promise each, over one that keeps them all."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from attrs import evolve

from accel_core import LaunchError, SubmittedJob, hooks, implements


class Starts:
    """Workers as plain processes. Nothing broken."""

    def __init__(self, config, run):
        pass

    @implements(hooks.launch)
    def launch(self, job):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        workers = [
            subprocess.Popen(job.argv, env={**os.environ, **variables}) for variables in self.variables(job)
        ]
        try:
            while any([worker.poll() is None for worker in workers]):  # noqa: C419 - each has to be asked
                for rank, worker in enumerate(workers):
                    if worker.returncode:
                        raise LaunchError(self.told(rank, worker), exit_code=worker.returncode, rank=rank)
                time.sleep(0.05)
            return max(worker.returncode for worker in workers)
        finally:
            self.stop(workers)

    def variables(self, job):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        size = str(job.processes_per_node)
        for rank in range(job.processes_per_node):
            world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            yield {**self.given(job), **world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def given(self, job):
        return job.environment

    def told(self, rank, worker):
        return f"rank {rank} ended with exit code {worker.returncode}\nits output says why"

    def stop(self, workers):
        for worker in workers:
            worker.kill()
            worker.wait()

    @implements(hooks.preview)
    def preview(self, job, submits):
        return f"mail {shlex.join(job.command)}" if submits else ""

    @implements(hooks.submit)
    def submit(self, job):
        Path("mail").write_text(shlex.join(job.command))
        return SubmittedJob(id="1", watch="look 1", cancel="drop 1")


class SilencesWorkers(Starts):
    """Rank 1 writes nowhere."""

    @implements(hooks.launch)
    def launch(self, job):
        program = (
            "import os, subprocess, sys\nquiet = subprocess.DEVNULL if os.environ['RANK'] == '1' else None\n"
        )
        program += "sys.exit(subprocess.run(sys.argv[1:], stdout=quiet).returncode)"
        return super().launch(evolve(job, argv=(sys.executable, "-c", program, *job.argv)))


class LeavesWorkers(Starts):
    def stop(self, workers):
        pass


class LosesExitCodes(Starts):
    @implements(hooks.launch)
    def launch(self, job):
        try:
            return super().launch(job)
        except LaunchError as error:
            raise LaunchError(str(error), rank=error.rank) from error


class ForgetsTheEnvironment(Starts):
    def given(self, job):
        return {}


class ForgetsThePort(Starts):
    def variables(self, job):
        for variables in super().variables(job):
            yield {name: text for name, text in variables.items() if name != "MASTER_PORT"}


class MisnumbersWorkers(Starts):
    def variables(self, job):
        for variables in super().variables(job):
            yield {**variables, "LOCAL_RANK": "0"}


class RepeatsFailures(Starts):
    def told(self, rank, worker):
        return f"rank {rank} failed\nTraceback (most recent call last)\nRuntimeError: a worker that fails"


class SendsPreviews(Starts):
    @implements(hooks.preview)
    def preview(self, job, submits):
        self.submit(job)
        return super().preview(job, submits)


class HidesArguments(Starts):
    @implements(hooks.preview)
    def preview(self, job, submits):
        return super().preview(evolve(job, command=job.command[:-1]), submits)
