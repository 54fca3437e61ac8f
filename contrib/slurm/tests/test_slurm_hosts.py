"""Hosts of a Slurm that fail, each a network namespace: jobs resume, or end with the host's name."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, missing, two_nodes

from accel_testing.patience import patience

JOB = str(Path(__file__).with_name("slurm_job.py"))
ADDRESSES = {"head": "10.81.0.1", "n1": "10.81.0.11", "n2": "10.81.0.12"}
SECONDS = patience(400)
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest, make_hosts) -> Iterator[Cluster]:
    """A Slurm that takes a node for lost after some seconds."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    with make_hosts(ADDRESSES) as made, two_nodes(folder, made, request.param) as cluster:
        yield cluster


def submit(cluster: Cluster, folder: Path, timeout: int, *flags: str) -> Path:
    """Hand a job to it, and return its output once it has saved a checkpoint."""
    accel = (sys.executable, "-m", "accel_core", "submit", "--launcher", "slurm", "--device", "cpu")
    given = ("--nodes", "2", "-n", "1", "--process-group.timeout", str(timeout), *flags)
    told = cluster.run(*accel, *given, JOB, "train_on", str(folder), cwd=folder, seconds=SECONDS)
    assert told.returncode == 0, told.stderr
    output = folder / f"slurm-{told.stdout.partition(chr(10))[0].removeprefix('job: ')}.out"
    wait_for((folder / "saved").exists, lambda: output.read_text() if output.exists() else "no output")
    return output


def wait_for(is_there: Callable[[], object], about: Callable[[], str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_there():
        assert time.monotonic() < deadline, about()
        time.sleep(0.2)


@pytest.mark.parametrize("cluster", [15], indirect=True)
@pytest.mark.parametrize(("node", "way"), [("n2", "is cut off"), ("n2", "dies"), ("n1", "dies")])
def test_a_job_that_loses_a_host_resumes_from_its_last_checkpoint_when_it_is_back(
    cluster, tmp_path, node, way
):
    """Slurm notices first, and puts the job into its queue again."""
    output, lost = submit(cluster, tmp_path, 120), cluster.hosts[node]

    if way == "dies":
        lost.dies()
    else:
        lost.cable("down")
    states = ("squeue", "--noheader", "--format=%T")
    wait_for(
        lambda: cluster.run(*states, cwd=tmp_path, seconds=SECONDS).stdout.strip() == "PENDING",
        output.read_text,
    )
    lost.dies()
    lost.cable("up")
    cluster.add(node)

    wait_for((tmp_path / "done").exists, output.read_text)
    done = json.loads((tmp_path / "done").read_text())
    assert 0 < done["began"] < done["ended"] == 200
    wait_for(lambda: not any(host.processes(JOB) for host in cluster.hosts.values()), output.read_text)


@pytest.mark.parametrize("cluster", [60], indirect=True)
@pytest.mark.parametrize("way", ["is cut off", "dies"])
def test_a_job_ends_that_lost_a_host_where_its_ranks_notice_first(cluster, tmp_path, way):
    """The job's step ends when Slurm notices, too."""
    lost = cluster.hosts["n2"]
    output = submit(cluster, tmp_path, 15, "--slurm.requeue", "false")

    if way == "dies":
        lost.dies()
    else:
        lost.cable("down")

    wait_for(lambda: "rank 0 (local 0) failed: " in output.read_text(), output.read_text)
    wait_for(lambda: not any(host.processes(JOB) for host in cluster.hosts.values()), output.read_text)
    assert not (tmp_path / "done").exists()
