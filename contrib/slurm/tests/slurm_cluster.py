"""A Slurm of two nodes on this machine, for tests: made, started and stopped by them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
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
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] CPUs=4 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
START_SECONDS = 60


def missing() -> str:
    """Return the reason why no Slurm can be started here; empty if one can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PLACES) is None]
    if absent:
        return f"Slurm is not installed: there is no {absent[0]} (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "slurmctld and slurmd run as root, and this is another user"


@contextmanager
def two_nodes(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons; give the variables with which commands find them."""
    environment = {**os.environ, "PATH": PLACES}
    for name in [name for name in environment if name.startswith(("SLURM_", "SBATCH_"))]:
        del environment[name]
    environment["SLURM_CONF"] = str(folder / "slurm.conf")
    text = CONFIGURATION.format(folder=folder, host=socket.gethostname(), ports=_free_ports(3))
    (folder / "slurm.conf").write_text(text)
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    daemons = [
        [
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"),
            f"--log-file={folder}/munged.log",
        ],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    running = []
    try:
        for words in daemons:
            running.append(_start(words, environment))
            if words[0] == "munged":
                _wait_for((folder / "munge.socket").exists, folder)
        _wait_for(lambda: _idle_nodes(environment) == 2, folder)
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, check=False, capture_output=True)
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _start(words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(words, env=environment, stdout=quiet, stderr=quiet, start_new_session=True)


def _idle_nodes(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--format=%D", "--states=idle"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
    return int(told.strip() or 0)


def _wait_for(is_there: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_there():
        if time.monotonic() > deadline:
            logs = [f"{file.name}: {file.read_text()[-600:]}" for file in sorted(folder.glob("*.log"))]
            raise AssertionError("Slurm does not start\n" + "\n".join(logs))
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
