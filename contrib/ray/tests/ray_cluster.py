"""A Ray cluster of several nodes on this machine, for tests: made, started and stopped by them."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accel_testing.patience import patience

START_SECONDS = patience(120)
MEMORY = 80_000_000
"""Bytes of a node's object store: near the least that Ray takes."""


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Start a head with the job server and no CPU, and two nodes of two CPUs."""
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobSubmissionClient

    # Paths of Ray's sockets may have 107 letters, so that pytest's folders are too deep.
    folder = tempfile.mkdtemp(prefix="ray-")
    # Jobs run the `python` that the nodes find; the interpreter of the tests must be it.
    before = dict(os.environ)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    Path(folder, "ray").mkdir()
    # The head waits 30 s for itself, and gives up on a machine that is busy.
    cluster: Any = Cluster()
    try:
        _patiently(lambda: _add_head(cluster))
        for _ in range(2):
            _patiently(lambda: add_node(cluster))
        server = f"http://{cluster.head_node.webui_url}"
        # It answers before it has an agent that starts jobs.
        _patiently(lambda: JobSubmissionClient(server).submit_job(entrypoint="true"))
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.clear()
        os.environ.update(before)


def _add_head(cluster: Any) -> None:
    server = {"include_dashboard": True, "dashboard_port": _free_port()}
    cluster.add_node(num_cpus=0, object_store_memory=MEMORY, **server)


def add_node(cluster: Any) -> Any:
    """Start a node of two CPUs."""
    return cluster.add_node(num_cpus=2, object_store_memory=MEMORY)


def _patiently(call: Callable[[], object]) -> None:
    """Call until it succeeds, or the time is over."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            call()
        except Exception:  # Ray's own, of no class of theirs
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        number: int = bound.getsockname()[1]
        return number
