"""Checkpoints in a store, and copies of local ones there, by a store that is a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import folder_store as job
import pytest
from async_job import start_ends

from accel_core import CheckpointError
from accel_core.checkpoint import stored
from accel_testing.patience import patience

ranks = pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.needs("accel-ddp"))])


@pytest.fixture(autouse=True)
def _served_here_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "store_for", stored.store_for)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return job.url_of(tmp_path / "store")


def run(run_processes, function: Callable[..., Any], *arguments: Any, world: int, **named: Any) -> list[Any]:
    """Call a function here, or in several processes."""
    return [function(*arguments, **named)] if world == 1 else run_processes(function, *arguments, world=world)


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


def test_a_file_is_sent_twice_and_a_store_that_is_away_is_an_error(url, tmp_path, caplog):
    store, run = job.installed(), job.made()
    failures = [True, False]
    store.fails = lambda hook, name: hook == "send" and bool(failures) and failures.pop(0)
    run[0].save_state(url)
    assert "is sent once more, since ConnectionError: the store is away" in caplog.text

    store.fails = lambda hook, name: hook == "send"
    with pytest.raises(CheckpointError, match="the store is away"):
        run[0].save_state(f"{url}2")
    run[0].end_training()
    assert job.loaded(url)[0] == url
    assert job.loaded(f"{url}2")[0] == "None"


@ranks
def test_each_second_is_copied_whole_and_the_nearest_is_loaded(url, tmp_path, world, run_processes):
    arguments = str(tmp_path / "a"), url, 5
    if world == 1:
        sums = job.trained(*arguments, store_every=2, total_limit=2)
    else:
        sums = run_processes(every_second, *arguments, world=world)[0]

    files = [f"rank-{rank:05d}.{end}" for rank in range(world) for end in ("json", "safetensors")]
    whole = sorted(["manifest-00000001.json", "manifest.json", *files, "state.json"])
    copies = (tmp_path / "store/checkpoints").iterdir()
    found = {each.name: sorted(file.name for file in each.rglob("*") if file.is_file()) for each in copies}
    assert {name: files for name, files in found.items() if files} == {
        "checkpoint_2": whole,
        "checkpoint_4": whole,
    }
    local = sorted(each.name for each in (tmp_path / "a/checkpoints").iterdir())
    assert local == ["checkpoint_3", "checkpoint_4"]
    for folder in ("a", "another machine"):
        for where, found in run(run_processes, job.resumed, str(tmp_path / folder), url, world=world):
            assert where.endswith("checkpoint_4")
            assert found == sums[4]


def every_second(folder: str, url: str, saves: int) -> list[float]:
    return job.trained(folder, url, saves, store_every=2, total_limit=2)


@ranks
def test_a_copy_that_failed_is_made_by_the_next_save_and_not_once_more(url, tmp_path, world, run_processes):
    found = run(
        run_processes, job.trained_while_it_is_away, str(tmp_path / "a"), url, 5, (0, 1), 4, world=world
    )

    first = ["checkpoint_0"]
    assert [copied for copied, _ in found] == [[[], [], first, first, [*first, "checkpoint_4"]]] * world
    for _, said in found:
        assert len(said) == 2
        assert all("the store is away" in each for each in said)


def test_a_newer_one_that_is_due_takes_the_place_of_one_that_failed(url, tmp_path):
    copied, _ = job.trained_while_it_is_away(str(tmp_path / "a"), url, 4, (0, 1), 2)

    assert copied == [[], [], ["checkpoint_2"], ["checkpoint_2"]]


def test_a_save_that_is_not_due_does_not_wait_for_a_copy(url, tmp_path):
    store, run = job.installed(), job.tiered(str(tmp_path / "a"), url, store_every=4)
    may_go_on, over = Event(), []

    def wait(hook: str, name: str) -> bool:
        if hook == "send":
            may_go_on.wait(patience(10))
            over.append(name)
        return False

    store.fails = wait
    for _ in range(2):
        job.step(*run)
        run[0].save_state()
    assert not over
    may_go_on.set()
    run[0].end_training()
    assert job.whole_ones(url) == ["checkpoint_0"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["never", "later", "begun"])
def test_a_copy_whose_start_was_interrupted_is_due_as_before(url, tmp_path, how):
    job.installed()
    run = job.tiered(str(tmp_path / "a"), url, store_every=4)
    with start_ends("copy", how) as begin_later:
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            run[0].save_state()
        run[0].wait_for_checkpoint()
        assert job.whole_ones(url) == (["checkpoint_0"] if how == "begun" else [])
        if how == "later":
            begin_later()
            assert job.whole_ones(url) == []
    run[0].save_state()
    run[0].end_training()
    assert job.whole_ones(url) == ["checkpoint_0" if how == "begun" else "checkpoint_1"]


def test_a_restart_makes_the_copy_that_was_due(url, tmp_path):
    store, run = job.installed(), job.tiered(str(tmp_path / "a"), url, store_every=2)
    store.fails = lambda hook, name: hook == "send"
    job.step(*run)
    run[0].save_state()
    with pytest.raises(CheckpointError, match="the store is away"):
        run[0].end_training()
    assert job.whole_ones(url) == []

    assert job.resumed(str(tmp_path / "a"), url, store_every=2)[0].endswith("checkpoint_0")
    assert job.whole_ones(url) == ["checkpoint_0"]


def test_another_runs_copy_is_left_as_it_is(url, tmp_path):
    job.trained(str(tmp_path / "a"), url, 1)
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    job.installed()
    run = job.tiered(str(tmp_path / "b"), url)
    job.step(*run)
    run[0].save_state(step=0)
    run[0].end_training()

    after = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert {path: after[path] for path in before} == before


def test_a_copy_whose_commits_answer_is_lost_is_not_sent_again(url, tmp_path):
    store, run = job.installed(), job.tiered(str(tmp_path / "a"), url, store_every=4)
    store.fails = lambda hook, name: ("created", "manifest-00000001.json") in store.asked
    job.step(*run)
    run[0].save_state()
    with pytest.raises(CheckpointError, match="the store is away"):
        run[0].wait_for_checkpoint()
    store.fails, sent = lambda hook, name: False, store.asked.count(("send", "state.json"))
    run[0].save_state()
    run[0].wait_for_checkpoint()

    assert job.whole_ones(url) == ["checkpoint_0"]
    assert store.asked.count(("send", "state.json")) == sent
    run[0].end_training()
