"""Checkpoints in a repository of a stand-in of the Hugging Face Hub: a create is a judged commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import UnsupportedOperation
from pathlib import Path

import pytest
import stored_job as job
import torch
from hub_server import REPOSITORY, TOKEN, Commit, HubServer

from accel_core import CheckpointError, storage_at
from accel_stores import hub as module
from accel_stores.hub import Hub
from accel_testing.patience import patience

RUN = f"hf://{REPOSITORY}/run"
URL = f"{RUN}/ck"


@pytest.fixture
def store() -> Hub:
    return Hub()


def at_first(do: Callable[[], bool | None], name: str) -> Callable[[Commit], bool | None]:
    """Do it before the first commit of a file of this name."""
    done: list[Commit] = []

    def before(commit: Commit) -> bool | None:
        if name in commit.names and not done:
            done.append(commit)
            return do()
        return None

    return before


# -- the proof that the row rests on ---------------------------------------------------------------


def test_a_second_create_is_refused_by_the_hub_itself(hub: HubServer, store: Hub) -> None:
    store.create(URL, b"first")
    with pytest.raises(FileExistsError):
        store.create(URL, b"second")
    first, second = hub.seen
    assert (first.answered, second.answered) == (200, 412)
    assert first.parent == second.parent
    assert hub.files["run/ck"] == b"first"


@pytest.mark.full
def test_a_second_create_of_the_same_content_is_refused(hub: HubServer, store: Hub) -> None:
    store.create(URL, b"same")
    with pytest.raises(FileExistsError):
        store.create(URL, b"same")


@pytest.mark.full
def test_a_file_of_another_writer_is_not_written_over(hub: HubServer, store: Hub) -> None:
    hub.put({"run/ck": b"another's"})
    with pytest.raises(FileExistsError):
        store.create(URL, b"mine")
    assert hub.files["run/ck"] == b"another's"
    assert hub.seen == []


@pytest.mark.full
def test_a_hub_that_ignores_the_parent_is_refused_before_anything_is_sent(hub: HubServer) -> None:
    hub.judges = False
    with pytest.raises(CheckpointError, match="this store created one file twice"):
        job.saved(URL, 1)
    assert {commit.names[0][:6] for commit in hub.seen} == {"claim-"}, "two creates, and the removal"
    assert len(hub.seen) == 3
    assert hub.names == []


@pytest.mark.full
def test_a_bucket_takes_no_checkpoints() -> None:
    with pytest.raises(UnsupportedOperation):
        storage_at("hf://buckets/owner/bucket").create("ck", b"")


# -- other commits come between ---------------------------------------------------------------------


@pytest.mark.full
def test_a_create_is_tried_again_if_the_head_has_moved_since_the_look(hub: HubServer, store: Hub) -> None:
    hub.before = at_first(lambda: hub.put({"other": b""}), "ck")
    store.create(URL, b"mine")
    assert [commit.answered for commit in hub.seen] == [412, 200]
    assert hub.files["run/ck"] == b"mine"


@pytest.mark.full
def test_a_create_fails_if_the_file_has_come_since_the_look(hub: HubServer, store: Hub) -> None:
    hub.before = at_first(lambda: hub.put({"run/ck": b"another's"}), "ck")
    with pytest.raises(FileExistsError):
        store.create(URL, b"mine")
    assert hub.files["run/ck"] == b"another's"


@pytest.mark.full
def test_a_create_that_is_always_overtaken_ends_and_says_so(
    hub: HubServer, store: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITS", (0.0, 0.0))
    hub.before = lambda commit: hub.put({"other": b""})
    with pytest.raises(OSError, match="other commits came between 3 times"):
        store.create(URL, b"mine")
    assert len(hub.seen) == 3


@pytest.mark.full
@pytest.mark.parametrize("status", [409, 412])
def test_a_file_that_was_overtaken_is_sent_again(
    hub: HubServer, store: Hub, tmp_path: Path, status: int
) -> None:
    tries: list[str] = []

    def refuses(method: str, path: str) -> int | None:
        if "/commit/" in path:
            tries.append(path)
            return status if len(tries) == 1 else None
        return None

    hub.refuses = refuses
    (tmp_path / "file").write_bytes(b"content")
    store.send(tmp_path / "file", URL)
    assert hub.files["run/ck"] == b"content"
    assert len(tries) == 2


@pytest.mark.full
def test_a_removal_is_tried_again_if_the_head_has_moved_since_the_look(hub: HubServer, store: Hub) -> None:
    hub.put({"run/ck": b"", "run/kept": b""})
    hub.before = at_first(lambda: hub.put({"run/other": b""}), "ck")
    store.remove([URL, f"{RUN}/gone"])
    assert hub.names == ["run/kept", "run/other"]


# -- reads --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_read_is_of_the_newest_commit(hub: HubServer, store: Hub) -> None:
    hub.put({"run/ck": b"old"})
    assert store.entries(RUN) == {"ck": 3}
    hub.put({"run/ck": b"new and longer"})
    assert store.content(URL, 0, 14) == b"new and longer"
    assert store.entries(RUN) == {"ck": 14}


@pytest.mark.full
def test_a_repository_that_is_made_later_is_found(hub: HubServer, store: Hub) -> None:
    hub.refuses = lambda method, path: 404
    with pytest.raises(FileNotFoundError):
        store.entries(RUN)
    hub.refuses = lambda method, path: None
    assert store.entries(RUN) == {}


# -- save and load -----------------------------------------------------------------------------------


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.by_default("1")
def test_what_is_saved_is_loaded_bit_by_bit(hub: HubServer, world: int, run_processes) -> None:
    saved = run_processes(job.saved, URL, 2, world=world)
    for found in run_processes(job.loaded, URL, world=world):
        assert torch.equal(found, saved[0])


@pytest.mark.full
def test_a_save_under_the_same_name_replaces_the_one_before(hub: HubServer) -> None:
    job.saved(URL, 1)
    before = set(hub.names)
    expected = job.saved_again(URL, 2)
    assert torch.equal(job.loaded(URL), expected)
    assert not before & set(hub.names)
    assert len(before) == len(hub.names)


def test_of_two_writers_one_wins_and_the_other_says_so(hub: HubServer, run_processes) -> None:
    """Both are held at the commit until both are there."""
    both, held = threading.Barrier(2, timeout=patience(120)), []

    def hold(commit: Commit) -> None:
        if "manifest-00000001.json" in commit.names and len(held) < 2:
            held.append(commit)
            both.wait()

    hub.before = hold
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(run_processes, job.tried, URL, steps, world=1) for steps in (1, 2)]
        said = [each.result()[0] for each in tries]
    winner = said.index("")
    assert "has appeared while this save was written: another run saves there" in said[1 - winner]
    assert torch.equal(job.loaded(URL), job.saved("memory://other/ck", winner + 1))
    assert len([name for name in hub.names if name.endswith(".safetensors")]) == 1, "the loser's are gone"


@pytest.mark.full
def test_a_commit_whose_answer_is_lost_is_found_to_be_done(hub: HubServer) -> None:
    hub.before = at_first(lambda: True, "manifest-00000001.json")
    expected = job.saved(URL, 2)
    assert [each.answered for each in hub.seen if "manifest-00000001.json" in each.names] == [500]
    assert torch.equal(job.loaded(URL), expected)


def test_no_file_holds_the_token(hub: HubServer) -> None:
    job.saved(URL, 1)
    assert not [name for name, content in hub.files.items() if TOKEN.encode() in content]


# -- what cannot be saved -----------------------------------------------------------------------------


@pytest.mark.full
def test_a_repository_that_is_not_there_is_told_before_anything_is_sent(hub: HubServer) -> None:
    with pytest.raises(CheckpointError, match="FileNotFoundError.*repository not found"):
        job.saved("hf://owner/nothing/run/ck", 1)
    assert hub.seen == []


@pytest.mark.full
def test_nothing_is_sent_to_a_repository_that_is_not_there(
    hub: HubServer, store: Hub, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(FileNotFoundError):
        store.send(tmp_path / "file", "hf://owner/nothing/file")


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("at", ["/revision/", "/commit/"])
@pytest.mark.by_default
def test_missing_rights_are_told(hub: HubServer, store: Hub, status: int, at: str) -> None:
    hub.refuses = lambda method, path: status if at in path else None
    with pytest.raises(PermissionError, match=f"the hub answered {status}"):
        store.create(URL, b"")


@pytest.mark.full
def test_a_file_that_the_repository_ignores_is_told(hub: HubServer, store: Hub, tmp_path: Path) -> None:
    hub.ignored = "ck"
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(OSError, match=r"left out of the commit, as the repository's \.gitignore may say"):
        store.send(tmp_path / "file", URL)
