"""A Ray cluster whose machines are network namespaces: a head without CPUs, n1 and n2; and a job on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accel_testing.hosts import Host
from accel_testing.patience import patience

JOB = str(Path(__file__).with_name("ray_job.py"))
ADDRESSES = {"head": "10.79.0.1", "n1": "10.79.0.11", "n2": "10.79.0.12"}
CLUSTER = f"{ADDRESSES['head']}:6379"
MEMORY = 80_000_000
"""Bytes of a node's object store: near the least that Ray takes."""
ACCEL = """
import functools, ray, sys
ray.init = functools.partial(ray.init, _node_ip_address=sys.argv.pop(1))
from accel_core.cli import main
sys.exit(main())
"""
"""Ray looks for a node among the machine's processes, which here are those of all hosts."""
SECONDS = patience(400)
WAIT = "60"
"""Seconds that ranks wait for each other."""
PATIENT = {"RAY_raylet_start_wait_time_s": "240", "RAY_worker_niceness": "0"}
"""Variables of Ray for a busy machine. A lost node or head has Ray's own minute."""


class Lab:
    """The cluster, and a job that trains on n1 and n2."""

    def __init__(self, hosts: dict[str, Host], temporary: Path) -> None:
        self.hosts, self._temporary = hosts, temporary
        self._folder = temporary
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": CLUSTER}
        self._environment = {**os.environ, **own, **PATIENT}
        self._starts = 0
        self.lost = set(hosts)
        self._launcher: subprocess.Popen[bytes] | None = None

    def begin(self, folder: Path) -> None:
        """Give a test its folder, and bring back the hosts that the test before it has lost."""
        self._folder = folder
        if self._launcher is not None:
            self._launcher.kill()
        if "head" in self.lost:
            self.lost = set(self.hosts)
            for host in self.hosts.values():
                host.dies()
        self.comes_back(*sorted(self.lost))  # the head is the first

    def loses(self, name: str, way: str) -> None:
        """Kill what runs on a host, or cut its cable."""
        self.lost.add(name)
        if way == "dies":
            self.hosts[name].dies()
        else:
            self.hosts[name].cable("down")

    def comes_back(self, *names: str) -> None:
        """Start hosts and Ray on them."""
        for name in names:
            self.hosts[name].dies()
            self.hosts[name].cable("up")
        for part in (set(names) & {"head"}, set(names) - {"head"}):
            self._start(*part)
        self.lost -= {*names}

    def _start(self, *names: str) -> None:
        """Start Ray on hosts; it gives up by itself where a machine is busy, so twice."""
        begun = {name: self._begin(name) for name in names}
        for name, first in begun.items():
            told = first.communicate(timeout=SECONDS)[0]
            if first.returncode:
                self.hosts[name].dies()
                again = self._begin(name)
                told += again.communicate(timeout=SECONDS)[0]
                assert again.returncode == 0, told.decode()

    def _begin(self, name: str) -> subprocess.Popen[bytes]:
        self._starts += 1
        place = ("--address", CLUSTER, "--num-cpus", "2")
        if name == "head":
            place = ("--head", "--port", "6379", "--num-cpus", "0", "--include-dashboard", "false")
        own = ("--node-ip-address", ADDRESSES[name], "--temp-dir", f"{self._temporary}/{self._starts}")
        words = ("ray", "start", *place, *own, "--object-store-memory", str(MEMORY))
        return subprocess.Popen(
            self.hosts[name].command(*words),
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def launch(self, where: str, *flags: str) -> None:
        """Start the job from a host, and return when it has saved a checkpoint."""
        accel = (sys.executable, "-c", ACCEL, ADDRESSES[where])
        accel += ("launch", "--launcher", "ray", "--device", "cpu")
        given = ("--nodes", "2", "-n", "1", "--process-group.timeout", WAIT, *flags)
        with (self._folder / "said").open("w") as said:
            self._launcher = subprocess.Popen(
                self.hosts[where].command(*accel, *given, JOB, "train", str(self._folder)),
                env=self._environment,
                cwd=self._folder,
                stdout=said,
                stderr=said,
            )
        self.wait_for((self._folder / "step").exists)

    def placed(self) -> list[str]:
        """Return the hosts of the job's nodes, in their order."""
        ranks = [json.loads((self._folder / f"rank{rank}.json").read_text()) for rank in range(2)]
        return [each["host"] for each in ranks]

    def ends(self) -> int:
        """Return the exit code of the launcher; no host has a process of the job any more."""
        assert self._launcher is not None
        try:
            code = self._launcher.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher goes on\n{self.said()}") from None
        self.wait_for(lambda: not self.orphans())
        return code

    def orphans(self) -> list[str]:
        return [line for host in self.hosts.values() for line in host.processes(JOB).values()]

    def said(self) -> str:
        return (self._folder / "said").read_text()

    def done(self) -> dict[str, int]:
        facts: dict[str, int] = json.loads((self._folder / "done").read_text())
        return facts

    def wait_for(self, is_there: Callable[[], object]) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_there():
            assert time.monotonic() < deadline, f"{self.said()}\n{self.orphans()}"
            time.sleep(0.3)


@contextmanager
def laboratory(make_hosts: Callable[..., Any]) -> Iterator[Lab]:
    """Make the hosts, on which nothing runs yet."""
    # Paths of Ray's sockets may have 107 letters, so that pytest's folders are too deep.
    temporary = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        with make_hosts(ADDRESSES) as hosts:
            yield Lab(hosts, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
