"""A kill at any instant leaves a checkpoint that loads: the last committed one, or the one after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import kill_job
import pytest


@pytest.fixture
def folder():
    # In memory where there is such a place: a kill loses nothing there, and a save takes 5 ms, not 80.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        yield made


@pytest.fixture
def report(capsys, request):
    def say(found):
        with capsys.disabled():
            print(f"\n{request.node.name}: {found}")

    return say


MANY = pytest.mark.full
OTHERS = ("same name, async", "numbered", "numbered, async")
HOW = ["same name", *(pytest.param(how, marks=MANY) for how in OTHERS)]


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=MANY)])
@pytest.mark.parametrize("how", HOW)
def test_one_rank_killed_at_random(folder, report, how, kills, run_processes):
    (found,) = run_processes(kill_job.kill_at_random, folder, how, kills, world=1, timeout=110)
    report(found)
    assert found["leftovers"] > 3, "the kills missed the saves"
    assert found["left at the end"] == 0, "the next save removes what killed ones left"


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("kills", [5, pytest.param(25, marks=MANY)])
@pytest.mark.parametrize("how", ["same name", pytest.param("numbered, async", marks=MANY)])
def test_two_ranks_killed_at_random(folder, report, how, kills, run_processes):
    (found,) = run_processes(kill_job.kill_ranks_at_random, folder, how, kills, world=1, timeout=110)
    report(found)
    assert found["leftovers"] > 0, "the kills missed the saves"


@pytest.mark.parametrize("fresh", [True, False], ids=["first", "replacing"])
@pytest.mark.parametrize(
    ("how", "links"),
    [
        ("same name", True),
        pytest.param("same name", False, marks=MANY),
        pytest.param("same name, async", True, marks=MANY),
        pytest.param("numbered", True, marks=MANY),
    ],
)
@pytest.mark.by_default
def test_killed_at_each_point(folder, report, how, links, fresh, run_processes):
    (found,) = run_processes(kill_job.kill_at_each_point, folder, how, links, fresh, world=1, timeout=110)
    report(found)
    assert found["points"] > 20
    assert found["new"] > 0
    assert found["none"] == (0 if not fresh else found["none"])
    assert found["old"] > 0 or fresh
