"""The cluster: found, looked at, and its nodes reserved for a job."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import ray
from attrs import evolve
from ray.util.placement_group import placement_group, remove_placement_group

from accel_core import Job, LaunchError
from accel_ray.config import RayConfig
from accel_ray.jobs import sent_folder
from accel_ray.loss import HeadLost
from accel_ray.place import job_around

__all__ = ["connected", "counted", "needed", "reserved"]

CONNECT_SECONDS: Final = 10
SETTLE_SECONDS: Final = 20
"""Time in which Ray gives free nodes to a job."""
NOTICE_SECONDS: Final = 3
POLL_SECONDS: Final = 1

REMEDY: Final = "name one with --ray.address HOST:PORT or RAY_ADDRESS, or start one with `ray start --head`"


@contextmanager
def connected(config: RayConfig) -> Iterator[None]:
    """Connect to the cluster of the job of Ray around this process.

    Outside of one, to that of the config.

    Raises:
        LaunchError: none answers.
    """
    inside = job_around(os.environ) is not None
    address = "auto" if inside else (config.address or os.environ.get("RAY_ADDRESS") or "auto")
    _refuse_silent(address)
    folder = None if inside else sent_folder(config)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=None if folder is None else {"working_dir": str(folder)},
        )
    except Exception as error:  # of Ray and of its network library
        told = str(error).strip().partition("\n")[0]
        raise LaunchError(f"no cluster of Ray answers at {address}: {told}\n{REMEDY}") from error
    try:
        yield
    finally:
        ray.shutdown()


def needed(job: Job, config: RayConfig) -> dict[str, int]:
    """Return the resources that each node of a job must have.

    The cluster is connected.
    """
    gpus = config.gpus_per_process
    if gpus is None:
        gpus = int(any(_has(node, {"GPU": 1}) for node in _alive()))
    each = {"CPU": config.cpus_per_process, "GPU": gpus}
    return {name: number * job.processes_per_node for name, number in each.items() if number}


def counted(job: Job, config: RayConfig) -> Job:
    """Return the job with the number of processes that `auto` means.

    It is one per GPU of a node, else 1. The cluster is connected.
    """
    if job.processes_per_node:
        return job
    counts = sorted((int(node["Resources"].get("GPU", 0)) for node in _alive()), reverse=True)
    each = 1 if config.gpus_per_process is None else config.gpus_per_process
    number = counts[job.nodes - 1] // each if each and job.nodes <= len(counts) else 1
    return evolve(job, processes_per_node=max(1, number))


@contextmanager
def reserved(nodes: int, each: Mapping[str, int], config: RayConfig) -> Iterator[Any]:
    """Reserve nodes, and give their placement group: a bundle on each.

    Raises:
        LaunchError: the cluster has too few such nodes, or others use them.
    """
    began = time.monotonic()
    _wait_for_nodes(nodes, each, config, began)
    group = placement_group([dict(each)] * nodes, strategy="STRICT_SPREAD")
    try:
        deadline = max(began + config.wait_seconds, time.monotonic() + SETTLE_SECONDS)
        told = False
        while not group.wait(POLL_SECONDS):
            if time.monotonic() > deadline:
                free = ray.available_resources()  # type: ignore[no-untyped-call]
                raise LaunchError(
                    f"{_asked(nodes, each)}, and other jobs use them: the cluster has {_listed(free)} free\n"
                    "end other jobs, or wait for them with --ray.wait-seconds 3600"
                )
            told = told or _say_waiting(began, nodes, each)
        yield group
    except HeadLost:  # it would be waited for
        raise
    except BaseException:
        _remove(group)
        raise
    else:
        _remove(group)


def _remove(group: Any) -> None:
    with suppress(Exception):  # the cluster may be gone
        remove_placement_group(group)


def _wait_for_nodes(nodes: int, each: Mapping[str, int], config: RayConfig, began: float) -> None:
    """Wait until the cluster has the nodes, busy or not."""
    told = False
    while len([node for node in _alive() if _has(node, each)]) < nodes:
        if time.monotonic() >= began + config.wait_seconds:
            has = "; ".join(f"{it['NodeManagerHostname']}: {_listed(it['Resources'])}" for it in _alive())
            raise LaunchError(
                f"{_asked(nodes, each)}, and the cluster has {has or 'no node'}\n"
                "ask for less with --nodes, -n, --ray.cpus-per-process or --ray.gpus-per-process; or, if"
                " nodes are to come, wait with --ray.wait-seconds 600"
            )
        told = told or _say_waiting(began, nodes, each)
        time.sleep(POLL_SECONDS)


def _say_waiting(began: float, nodes: int, each: Mapping[str, int]) -> bool:
    if time.monotonic() < began + NOTICE_SECONDS:
        return False
    sys.stderr.write(f"accel: waits for {nodes} node{'s' * (nodes > 1)} with {_listed(each)}\n")
    return True


def _refuse_silent(address: str) -> None:
    """Refuse an address that is none, or where nobody listens.

    Ray would try for a minute.
    """
    if "://" in address:
        raise LaunchError(
            f"{address} is not the address of a cluster that this machine can be part of\n"
            "start this on a machine of the cluster, with --ray.address HOST:PORT; or hand it over with"
            " `accel submit --launcher ray`"
        )
    host, _, port = address.rpartition(":")
    if address in ("auto", "local") or not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise LaunchError(f"no cluster of Ray answers at {address}: {error}\n{REMEDY}") from error


def _alive() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def _has(node: Mapping[str, Any], each: Mapping[str, int]) -> bool:
    return all(node["Resources"].get(name, 0) >= number for name, number in each.items())


def _asked(nodes: int, each: Mapping[str, int]) -> str:
    return f"{nodes} node{'s' * (nodes > 1)} with {_listed(each)} {'each ' * (nodes > 1)}were asked for"


def _listed(resources: Mapping[str, float]) -> str:
    shown = {name: resources.get(name, 0) for name in ("CPU", "GPU") if name in resources}
    return ", ".join(f"{name} {math.floor(number)}" for name, number in shown.items()) or "no CPU"
