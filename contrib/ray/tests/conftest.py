from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ray_cluster import two_nodes


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster of a head without CPUs, and two nodes of two CPUs."""
    pytest.importorskip("ray")
    with two_nodes() as cluster:
        yield cluster
