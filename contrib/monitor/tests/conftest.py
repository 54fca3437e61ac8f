"""Records of real runs, which several tests read."""

from __future__ import annotations

import importlib.util

import pytest
from monitor_job import train

from accel_testing import ProcessError


@pytest.fixture(scope="session")
def resumed(tmp_path_factory, run_processes):
    """A run that was killed at step 15, resumed from step 10 and ended at step 30: folder, losses, processes.

    On two processes where a strategy for that is installed.
    """
    folder = tmp_path_factory.mktemp("resumed")
    world = 2 if importlib.util.find_spec("accel_ddp") else 1
    with pytest.raises(ProcessError):
        run_processes(train, folder, 15, world=world)
    after = run_processes(train, folder, None, True, 0.1, 0.01, world=world)[0]
    return folder, after, world


@pytest.fixture(scope="session")
def whole(tmp_path_factory, run_processes):
    """The folder of a run with another learning rate, and its losses."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_processes(train, folder, None, False, 0.05, world=1)[0]
