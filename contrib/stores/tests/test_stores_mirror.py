"""Checkpoints on the local disk, each nth copied to a store in the background."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mirror_job
import pytest
import stored_job as job
import torch
from s3_server import BUCKET, Request, S3Server

from accel_core import CheckpointError, ConfigError
from accel_testing import ProcessError
from accel_testing.patience import patience

STORE = f"s3://{BUCKET}/run"
ranks = pytest.mark.parametrize("world", [1, 2])


def run(run_processes, function: Callable[..., Any], *arguments: Any, world: int) -> list[Any]:
    """Call a function here, or in several processes."""
    return [function(*arguments)] if world == 1 else run_processes(function, *arguments, world=world)


def copied(s3: S3Server) -> dict[str, list[str]]:
    """Return the names below each committed checkpoint in the store."""
    keys = [key.split("/") for key in s3.names() if key.startswith("run/checkpoints/")]
    done = {key[2] for key in keys if key[3].startswith("manifest-")}
    return {name: sorted(key[-1] for key in keys if key[2] == name) for name in sorted(done)}


def local(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def named(*numbers: int) -> list[str]:
    return [f"checkpoint_{number}" for number in numbers]


def held(s3: S3Server) -> tuple[threading.Event, threading.Event]:
    """Hold the data of each copy; return an event of its coming, and the one that lets it pass."""
    reached, opened = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if request.method == "PUT" and request.name.endswith(".safetensors"):
            reached.set()
            opened.wait(patience(100))

    s3.fault = hold
    return reached, opened


# -- which are copied -----------------------------------------------------------------------------------


@pytest.mark.needs("accel-ddp")
@ranks
@pytest.mark.by_default("2")
def test_every_second_is_copied_and_loaded_from_its_url(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    options = {"every": 2, "total_limit": 2}
    weights = run(run_processes, mirror_job.trained, str(tmp_path), STORE, 5, options, world=world)[0]
    files = [f"rank-{rank:05d}.{end}" for rank in range(world) for end in ("json", "safetensors")]
    whole = sorted(["manifest-00000001.json", *files, "state.json"])
    assert copied(s3) == dict.fromkeys(named(2, 4), whole), "total_limit counts in each place"
    assert local(tmp_path)[-2:] == named(3, 4)
    for found in run(run_processes, job.loaded, f"{STORE}/checkpoints/checkpoint_2", world=world):
        assert torch.equal(found, weights[2])


@pytest.mark.needs("accel-ddp")
@ranks
@pytest.mark.by_default("1")
def test_the_end_copies_the_newest_and_another_machine_goes_on_from_there(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    weights = run(run_processes, mirror_job.trained, str(tmp_path), STORE, 4, {"every": 2}, world=world)[0]
    assert list(copied(s3)) == named(0, 2, 3)
    shutil.rmtree(tmp_path / "checkpoints")
    for place, weight in run(run_processes, mirror_job.resumed, STORE, world=3 - world):
        assert place == f"{STORE}/checkpoints/checkpoint_3"
        assert torch.equal(weight, weights[3])


@pytest.mark.full
def test_keep_counts_in_the_store_alone(s3: S3Server, tmp_path: Path) -> None:
    mirror_job.trained(str(tmp_path), STORE, 4, {"keep": 1})
    assert list(copied(s3)) == named(3)
    assert local(tmp_path) == named(0, 1, 2, 3)
    mirror_job.trained(str(tmp_path), STORE, 1, {"keep": 2})
    assert list(copied(s3)) == named(3, 4), "the copies of the run that was resumed are counted"


@pytest.mark.full
def test_the_best_stays_in_the_store_too(s3: S3Server, tmp_path: Path) -> None:
    options = {"keep_best": "loss", "total_limit": 1}
    accelerator, model, _ = mirror_job.mirrored(str(tmp_path), STORE, **options)
    for loss in (3.0, 1.0, 2.0, 4.0):
        with torch.no_grad():
            accelerator.unwrap_model(model).weight.fill_(loss)
        accelerator.save_state(metrics={"loss": loss})
    accelerator.end_training()
    assert list(copied(s3)) == named(1, 3)
    accelerator, model, _ = job.numbered(STORE, **options)
    assert str(accelerator.load_state(best=True)) == f"{STORE}/checkpoints/checkpoint_1"
    assert (job.weight(accelerator, model) == 1.0).all()
    accelerator.end_training()


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@ranks
def test_each_copy_holds_what_was_saved_when_saves_go_on_in_the_background(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    weights = run(run_processes, mirror_job.trained, str(tmp_path), STORE, 4, {}, True, world=world)[0]
    assert list(copied(s3)) == named(0, 1, 2, 3)
    for number, weight in enumerate(weights):
        assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_{number}"), weight)


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
def test_nodes_with_disks_of_their_own_make_one_copy(s3: S3Server, tmp_path: Path, run_processes) -> None:
    options = {"save_on_each_node": True}
    weights = run(run_processes, mirror_job.trained, str(tmp_path), STORE, 2, options, world=2)[0]
    assert list(copied(s3)) == named(0, 1)
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_1"), weights[1])


def test_a_checkpoint_is_kept_until_it_is_copied(s3: S3Server, tmp_path: Path) -> None:
    accelerator, model, optimizer = mirror_job.mirrored(str(tmp_path), STORE, every=9, total_limit=1)
    reached, opened = held(s3)
    accelerator.save_state()
    assert reached.wait(patience(100))
    for _ in range(2):
        job.step(accelerator, model, optimizer)
        accelerator.save_state()
    assert local(tmp_path) == named(0, 2), "total_limit passes over what is being copied"
    assert list(copied(s3)) == [], "the saves after it have not waited"
    opened.set()
    accelerator.end_training()
    assert list(copied(s3)) == named(2), "keep counts both"
    mirror_job.trained(str(tmp_path), STORE, 1, {"every": 9, "total_limit": 1})
    assert local(tmp_path) == named(3), "the next save removes what was passed over"


@pytest.mark.full
def test_a_checkpoint_with_a_name_of_its_own_is_not_copied(s3: S3Server, tmp_path: Path) -> None:
    accelerator, *_ = mirror_job.mirrored(str(tmp_path), STORE)
    for place in (tmp_path / "mine", tmp_path / "checkpoints/checkpoint_7"):
        accelerator.save_state(place)
    accelerator.end_training()
    assert s3.names() == []


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@ranks
def test_what_is_saved_when_the_job_is_told_to_stop_is_copied(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    weight, *_ = run_processes(mirror_job.preempted, str(tmp_path), STORE, world=world)
    assert list(copied(s3)) == named(0, 2), "the node's disk may be gone"
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_2"), weight)


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "numbers", "error", "said"),
    [
        (None, True, ConfigError, "mirror.url is not set"),
        (STORE, False, ConfigError, "set project.automatic_checkpoint_naming"),
        ("s3://nowhere/run", True, CheckpointError, "there is no bucket nowhere"),
        ("nobody://bucket/run", True, CheckpointError, "no plugin here reads and writes nobody: URLs"),
    ],
)
@pytest.mark.by_default
def test_a_mirror_that_cannot_work_is_refused_before_training(
    s3: S3Server, tmp_path: Path, store: str | None, numbers: bool, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        mirror_job.mirrored(str(tmp_path), store, automatic_checkpoint_naming=numbers)


@pytest.mark.full
def test_another_runs_copy_is_left_as_it_is(s3: S3Server, tmp_path: Path) -> None:
    (weight,) = mirror_job.trained(str(tmp_path / "a"), STORE, 1)
    assert "is another run's checkpoint; it was left as it is" in mirror_job.tried(
        str(tmp_path / "b"), STORE, 1
    )
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_0"), weight)


# -- faults ----------------------------------------------------------------------------------------------


def refuse_writes(request: Request) -> int | None:
    return 403 if request.method in ("PUT", "POST") else None


@pytest.mark.needs("accel-ddp")
@ranks
@pytest.mark.by_default("1")
def test_a_store_that_is_away_for_a_while_stops_no_save(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    refused: list[str] = []

    def refuse(request: Request) -> int | None:
        is_data = request.method == "PUT" and request.name.endswith(".safetensors")
        if is_data and "/checkpoint_1/" in request.path:
            refused.append(request.path)
            return 403
        return None

    s3.fault = refuse
    (said, *_) = run(run_processes, mirror_job.tried, str(tmp_path), STORE, 3, world=world)
    assert refused
    assert said == "", "a newer one was copied"
    assert local(tmp_path) == named(0, 1, 2)
    assert list(copied(s3)) == named(0, 2)
    assert not [key for key in s3.names() if "/checkpoint_1/" in key], "nothing is left of what failed"


def test_a_copy_that_fails_is_told_by_the_next_save(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, *_ = mirror_job.mirrored(str(tmp_path), STORE)
    s3.fault = refuse_writes
    accelerator.save_state()
    accelerator.save_state()
    assert f"the copy to {STORE}/checkpoints/checkpoint_0 failed" in caplog.text
    assert "PermissionError" in caplog.text
    s3.fault = lambda request: None
    accelerator.end_training()
    assert list(copied(s3)) == named(1), "what failed is tried once more at the end"


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@ranks
def test_a_copy_that_fails_at_the_end_is_an_error_of_the_end_on_all_ranks(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    s3.fault = lambda request: 403 if request.method == "PUT" and "rank-" in request.name else None
    said = run(run_processes, mirror_job.tried, str(tmp_path), STORE, 1, world=world)
    assert len(said) == world
    for text in said:
        assert f"the copy to {STORE}/checkpoints/checkpoint_0 failed" in text
        assert "PermissionError" in text
    assert local(tmp_path) == named(0)


@pytest.mark.full
def test_a_load_goes_on_while_the_store_is_away(s3: S3Server, tmp_path: Path) -> None:
    accelerator, model, optimizer = mirror_job.mirrored(str(tmp_path), STORE)
    s3.fault = refuse_writes
    saved = accelerator.save_state()
    before = job.weight(accelerator, model)
    job.step(accelerator, model, optimizer)
    assert accelerator.load_state().directory == saved
    assert torch.equal(job.weight(accelerator, model), before)
    with pytest.raises(CheckpointError, match="the copy to .* failed"):
        accelerator.end_training()


@pytest.mark.full
def test_a_copy_is_waited_for_when_the_save_after_it_has_failed(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no room")

    accelerator, *_ = mirror_job.mirrored(str(tmp_path), STORE, every=9)
    reached, opened = held(s3)
    accelerator.save_state()
    assert reached.wait(patience(100))
    monkeypatch.setattr("accel_core.storage.pending.Share.write", fail)
    accelerator.save_state(wait=False)
    threading.Timer(1.0, opened.set).start()
    with pytest.raises(CheckpointError, match="the save to .*checkpoint_1 failed"):
        accelerator.end_training()
    assert list(copied(s3)) == named(0)


@pytest.mark.full
def test_a_copy_whose_commits_answer_is_lost_is_found_and_not_made_twice(
    s3: S3Server, tmp_path: Path
) -> None:
    lost: list[Request] = []

    def lose(request: Request) -> str | None:
        if request.name == "manifest-00000001.json" and request.is_conditional and not lost:
            lost.append(request)
            return "lose"
        return None

    s3.fault = lose
    mirror_job.trained(str(tmp_path), STORE, 1)
    assert lost
    assert list(copied(s3)) == named(0)
    assert len([each for each in s3.seen if each.method == "PUT" and "safetensors" in each.name]) == 1


@pytest.mark.full
def test_a_kill_in_a_copy_leaves_nothing_that_loads_and_the_next_run_removes_it(
    s3: S3Server, tmp_path: Path, run_processes
) -> None:
    def kill(request: Request) -> None:
        if request.method == "PUT" and request.name.endswith(".safetensors"):
            os.kill(int(s3.content("pid")), signal.SIGKILL)

    s3.fault = kill
    with pytest.raises(ProcessError) as raised:
        run_processes(mirror_job.killed_in_a_copy, s3.url, str(tmp_path), STORE, world=1)
    assert raised.value.kind == f"exit -{signal.SIGKILL.value}"
    s3.wait_until_idle()
    s3.fault = lambda request: None
    assert copied(s3) == {}
    assert [key for key in s3.names() if "/checkpoint_0/" in key], "the copy was under way"
    accelerator, *_ = job.numbered(STORE)
    assert accelerator.load_state(missing_ok=True) is None, "a fresh machine has nothing to go on from"
    accelerator.end_training()

    (weight,) = mirror_job.trained(str(tmp_path), STORE, 1)
    assert list(copied(s3)) == named(1)
    assert not [key for key in s3.names() if "/checkpoint_0/" in key]
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_1"), weight)
