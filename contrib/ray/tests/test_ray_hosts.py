"""Hosts of a Ray cluster that fail, each a network namespace: jobs resume, or end with the host's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_hosts import JOB, Lab, laboratory

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster(make_hosts) -> Iterator[Lab]:
    pytest.importorskip("ray")
    with laboratory(make_hosts) as lab:
        yield lab


@pytest.fixture
def lab(cluster: Lab, tmp_path: Path) -> Lab:
    cluster.begin(tmp_path)
    return cluster


@pytest.mark.parametrize(("node", "way"), [(1, "is cut off"), (1, "dies"), (0, "dies")])
def test_a_job_that_loses_a_host_resumes_from_its_last_checkpoint_when_it_is_back(lab, node, way):
    lab.launch("head", "--max-restarts", "1", "--ray.wait-seconds", "500")
    lost = lab.hosts[lab.placed()[node]]

    lab.loses(lost.name, way)
    lab.wait_for(lambda: "; restart 1 of 1\n" in lab.said())
    lab.wait_for(lambda: not lost.processes(JOB))
    lab.comes_back(lost.name)

    assert lab.ends() == 0, lab.said()
    assert f"node {node} of the job ({lost.name}, {lost.address}) was lost: " in lab.said()
    assert 0 < lab.done()["began"] < lab.done()["ended"] == 40


@pytest.mark.parametrize("way", ["dies", "is cut off"])
def test_a_job_without_restarts_ends_and_names_the_host_that_it_lost(lab, way):
    lab.launch("head")
    lost = lab.hosts[lab.placed()[1]]

    lab.loses(lost.name, way)

    assert lab.ends() == 1, lab.said()
    assert f"node 1 of the job ({lost.name}, {lost.address}) was lost: " in lab.said()
    assert "with --max-restarts 3 the job starts again" in lab.said()


@pytest.mark.parametrize("way", ["dies", "is cut off"])
def test_a_job_whose_head_is_lost_ends_and_resumes_on_a_new_cluster(lab, tmp_path, way):
    """Ray keeps the cluster's state in its head."""
    lab.launch("n1", "--max-restarts", "1", "--ray.wait-seconds", "60")

    lab.loses("head", way)

    assert lab.ends() == 1, lab.said()
    assert "the cluster's head, 10.79.0.1:6379, has been silent for " in lab.said()
    lab.begin(tmp_path)
    lab.launch("n1")
    assert lab.ends() == 0, lab.said()
    assert 0 < lab.done()["began"] < lab.done()["ended"] == 40
