"""A Slurm of two nodes on this machine, for tests: made, started and stopped by them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from accel_testing.hosts import Host
from accel_testing.patience import patience

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
CONFIGURATION = """
ClusterName=lab
SlurmctldHost={head}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmUser=root
StateSaveLocation={folder}/state
SwitchType=switch/none
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout={timeout}
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
START_SECONDS = patience(60)


def missing() -> str:
    """Return the reason why no Slurm can be started here; empty if one can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PLACES) is None]
    if absent:
        return f"Slurm is not installed: there is no {absent[0]} (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "slurmctld and slurmd run as root, and this is another user"


@contextmanager
def two_nodes(folder: Path, hosts: Mapping[str, Host] | None = None, timeout: int = 300) -> Iterator[Cluster]:
    """Start the daemons, on this machine or on hosts "head", "n1" and "n2".

    timeout: seconds after which a silent node is lost.
    """
    ports, here = _free_ports(3), socket.gethostname()
    head = f"head({hosts['head'].address})" if hosts else f"{here}(127.0.0.1)"
    nodes = [
        f"NodeName={name} NodeHostname={name if hosts else here} Port={port} CPUs=4 State=UNKNOWN"
        f" NodeAddr={hosts[name].address if hosts else '127.0.0.1'}"
        for name, port in zip(("n1", "n2"), ports[1:], strict=True)
    ]
    text = CONFIGURATION.format(
        folder=folder, head=head, port=ports[0], nodes="\n".join(nodes), timeout=timeout
    )
    (folder / "slurm.conf").write_text(text)
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    cluster = Cluster(folder, hosts or {})
    try:
        cluster.start(
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"),
            f"--log-file={folder}/munged.log",
        )
        cluster.wait_for((folder / "munge.socket").exists)
        cluster.start("slurmctld", "-D", host="head")
        cluster.add("n1", "n2")
        yield cluster
    finally:
        cluster.end()


class Cluster:
    """The daemons of a Slurm."""

    def __init__(self, folder: Path, hosts: Mapping[str, Host]) -> None:
        self.hosts, self._folder = hosts, folder
        self._running: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "PATH": PLACES, "SLURM_CONF": str(folder / "slurm.conf")}
        """The variables with which commands find it."""
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
            del self.environment[name]

    def start(self, *words: str, host: str = "") -> None:
        """Start a daemon, on a host if there are hosts."""
        words = tuple(self.hosts[host].command(*words)) if host in self.hosts else words
        quiet = subprocess.DEVNULL
        self._running.append(
            subprocess.Popen(words, env=self.environment, stdout=quiet, stderr=quiet, start_new_session=True)
        )

    def add(self, *names: str) -> None:
        """Start nodes, and wait until both take jobs."""
        for name in names:
            self.start("slurmd", "-D", "-N", name, host=name)
        self.wait_for(lambda: self._idle() == 2)

    def run(self, *words: str, cwd: Path, seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command of a user, on the head if there are hosts."""
        words = tuple(self.hosts["head"].command(*words)) if self.hosts else words
        return subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
        )

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_there():
            if time.monotonic() > deadline:
                logs = [f"{it.name}: {it.read_text()[-600:]}" for it in sorted(self._folder.glob("*.log"))]
                raise AssertionError("Slurm does not start\n" + "\n".join(logs))
            time.sleep(0.2)

    def end(self) -> None:
        """End all jobs and daemons."""
        self.run("scancel", "--user=root", cwd=self._folder, seconds=START_SECONDS)
        for process in reversed(self._running):
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience(10))
            process.kill()
            process.wait()

    def _idle(self) -> int:
        words = ("sinfo", "--noheader", "--format=%D", "--states=idle")
        return int(self.run(*words, cwd=self._folder, seconds=START_SECONDS).stdout.strip() or 0)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
