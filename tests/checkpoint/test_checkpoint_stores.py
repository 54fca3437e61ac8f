"""Checkpoints at a URL, by a store that is a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import folder_store as job
import pytest

from accel_core import CheckpointError, ProjectConfiguration
from accel_core.checkpoint import places

ranks = pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.needs("accel-ddp"))])


@pytest.fixture(autouse=True)
def _served_here_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "store_for", places.store_for)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return job.url_of(tmp_path / "store")


def run(run_processes, function: Callable[..., Any], *arguments: Any, world: int) -> list[Any]:
    """Call a function here, or in several processes."""
    return [function(*arguments)] if world == 1 else run_processes(function, *arguments, world=world)


@ranks
def test_a_checkpoint_that_may_be_missing_is_loaded_where_it_is_there(url, world, run_processes):
    run(run_processes, job.saved, url, 1, world=world)
    expected = run(run_processes, job.saved, url, 2, world=world)

    found = run(run_processes, job.loaded, url, world=world)

    assert [folder for folder, _, _ in found] == [url] * world
    assert [weight for _, weight, _ in found] == expected


@ranks
def test_one_rank_looks_for_all_and_none_is_found(url, world, run_processes):
    found = run(run_processes, job.loaded, url, world=world)

    assert [folder for folder, _, _ in found] == ["None"] * world
    assert [bool(asked) for _, _, asked in found] == [True, False][:world]


def test_a_damaged_file_is_not_loaded(url, tmp_path):
    job.saved(url, 1)
    [data] = (tmp_path / "store").rglob("*.safetensors")
    data.write_bytes(bytes([data.read_bytes()[0]]) + data.read_bytes()[1:-1] + b"!")

    with pytest.raises(CheckpointError, match="is damaged"):
        job.loaded(url)


def test_a_store_that_is_away_is_an_error_and_what_is_there_stays(url):
    store, run = job.installed(), job.made()
    run[0].save_state(url)
    job.step(*run)
    for method in ("write", "list"):
        store.fails = lambda asked, name, method=method: asked == method
        for place in (url, f"{url}2"):
            with pytest.raises(CheckpointError, match="the store is away"):
                run[0].save_state(place)
    run[0].end_training()
    assert job.loaded(url)[0] == url
    assert job.loaded(f"{url}2")[0] == "None"


def test_a_store_that_cannot_be_read_now_is_not_passed_over(url):
    """Nothing older is taken: what is there may be whole."""
    store = job.installed()
    numbered = ProjectConfiguration(project_dir=url, automatic_checkpoint_naming=True)
    run = job.made(project_config=numbered)
    for _ in range(2):
        run[0].save_state()
    store.fails = lambda method, name: (method, name) == ("read", "state.json")
    with pytest.raises(CheckpointError, match="cannot be read: ConnectionError: the store is away"):
        run[0].load_state()
    store.fails = lambda method, name: False
    assert str(run[0].load_state()) == f"{url}/checkpoints/checkpoint_1"
    run[0].end_training()
