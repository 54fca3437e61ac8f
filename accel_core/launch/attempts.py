"""The attempts of a job on this node: one elastic_launch of torch per attempt, and its failure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accel_core.contract.job import Job
from accel_core.errors import LaunchError
from accel_core.launch.addresses import not_met
from accel_core.launch.failure import first_failure, noted_failures
from accel_core.launch.nodes import Nodes
from accel_core.launch.output import WorkerLogs
from accel_core.launch.signals import ENDING_SECONDS, Signals

Worker = tuple[Callable[..., Any] | str, Sequence[Any], str]


class _Settings(LaunchConfig):
    """torch's settings of an attempt, without torch's own search for devices.

    A process that has looked for devices cannot use them in its forks.
    """

    def __post_init__(self) -> None:
        self.shutdown_timeout = ENDING_SECONDS
        self.signals_to_handle = "SIGHUP,SIGQUIT"  # `Signals` handles the others


def run_attempts(
    job: Job, place: tuple[str, int], seconds: int, folder: str, signals: Signals, worker: Worker
) -> dict[int, Any]:
    """Run the workers of this node, with restarts if the job allows them; return their results by rank.

    A signal ends this process as signals do.

    Args:
        job: the job.
        place: host and port at which the nodes meet.
        seconds: time for which nodes wait for each other.
        folder: folder for the notes of workers.
        signals: the signal handlers of this process.
        worker: a program or function, its arguments, and the start method for a function.

    Raises:
        LaunchError: describes the failure of the last attempt.
    """
    try:
        signals.poll()
        return _run(job, Nodes(job, *place, seconds, signals.poll), folder, signals, worker)
    except SignalException as stop:  # from torch's handler, before the first poll
        sys.exit(128 + stop.sigval)
    except (DistError, RendezvousError) as error:
        raise not_met(job, place, error) from error


def _run(job: Job, nodes: Nodes, folder: str, signals: Signals, worker: Worker) -> dict[int, Any]:
    logs = WorkerLogs(folder, job, nodes)
    signals.workers = logs.processes
    failure: LaunchError | None = None
    try:
        for restart in count(1):
            try:
                results = _start(job, nodes, logs, worker)
            except ChildFailedError as error:
                failure = first_failure({**noted_failures(logs.notes), **error.failures})
            else:
                failure = None
            finally:
                logs.end()
                signals.end_children()
            signals.end_if_stopped(failure)
            if failure is None:
                return results
            if restart > job.max_restarts or signals.is_warned:
                raise failure
            reason = str(failure).partition("\n")[0]
            sys.stderr.write(f"accel: {reason}; restart {restart} of {job.max_restarts}\n")
        raise AssertionError  # count does not end
    except (SignalException, KeyboardInterrupt, SystemExit):
        failure = LaunchError(f"it was stopped by signal {signals.stopped or signal.SIGINT:d}")
        raise
    finally:
        nodes.end(failure)


def _start(job: Job, nodes: Nodes, logs: WorkerLogs, worker: Worker) -> dict[int, Any]:
    entrypoint, args, start_method = worker
    rendezvous_handler_registry.register(nodes.get_backend(), _handler)
    settings = _Settings(
        min_nodes=job.min_nodes or job.nodes,
        max_nodes=job.nodes,
        nproc_per_node=job.processes_per_node,
        logs_specs=logs,
        run_id=nodes.get_run_id(),
        role="worker",
        rdzv_backend=nodes.get_backend(),
        rdzv_configs={"nodes": nodes},
        max_restarts=0,
        start_method=start_method,
    )
    results: dict[int, Any] = elastic_launch(settings, entrypoint)(*args)
    return results


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    nodes: RendezvousHandler = parameters.config["nodes"]
    return nodes
