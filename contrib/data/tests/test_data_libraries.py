"""Each library itself, on tiny local data: each sample once, and a position to continue from."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from libraries_at_work import LENGTH, resumed, saved, whole, write

MODULES = {
    "datasets": "datasets",
    "datasets split": "datasets",
    "mosaic": "streaming",
    "litdata": "litdata",
    "webdataset": "webdataset",
    "webdataset WebLoader": "webdataset",
    "nodes": "torchdata",
}
pytestmark = pytest.mark.needs("accel-ddp")


@pytest.fixture(params=MODULES)
def library(request, tmp_path, run_processes):
    if find_spec(MODULES[request.param]) is None:
        pytest.skip(f"{MODULES[request.param]} is not installed")
    run_processes(write, tmp_path / "data", request.param, world=1)
    return request.param, tmp_path / "data"


def test_two_ranks_see_each_sample_once_per_epoch(library, run_processes):
    results = run_processes(whole, *library)
    for epoch in range(2):
        assert sorted(number for epochs, _ in results for number in epochs[epoch]) == list(range(LENGTH))
    assert all("shared by dataset: the data shares itself out" in text for _, text in results)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_the_same_world_resumes_with_each_sample_once(library, run_processes, workers):
    before = run_processes(saved, *library, workers)
    after = run_processes(resumed, *library, workers)
    assert sorted(number for part in before + after for number in part) == list(range(LENGTH))


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.full)])
def test_another_world_resumes_with_each_sample_once_or_is_refused(library, run_processes, world):
    before = run_processes(saved, *library)
    after = run_processes(resumed, *library, world=world)
    if library[0] in ("mosaic", "litdata"):
        assert sorted(number for part in before + after for number in part) == list(range(LENGTH))
    else:
        assert all("share 0 of 2, which the data makes itself" in text for text in after)
