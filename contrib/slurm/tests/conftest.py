from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from slurm_cluster import missing, two_nodes


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables with which commands find a Slurm of two nodes, n1 and n2."""
    if reason := missing():
        pytest.skip(reason)
    with two_nodes(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster.environment
