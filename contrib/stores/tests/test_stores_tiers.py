"""Checkpoints on the local disk, every M-th copied to a store: a restart takes the nearest valid one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3fs
import stored_job as job
import tiers_job
import torch
from s3_server import BUCKET, Request, S3Server

from accel_core import CheckpointError
from accel_testing import ProcessError
from accel_testing.patience import patience

STORE = f"s3://{BUCKET}/run"
NODES = {"save_on_each_node": True}
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


# -- copies, and loads over both places ----------------------------------------------------------------


@pytest.mark.needs("accel-ddp")
@ranks
@pytest.mark.by_default("2")
def test_every_second_is_copied_and_the_nearest_is_loaded(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    options = {"store_every": 2, "total_limit": 2}
    weights = run(run_processes, tiers_job.trained, str(tmp_path / "a"), STORE, 5, options, world=world)[0]
    files = [f"rank-{rank:05d}.{end}" for rank in range(world) for end in ("json", "safetensors")]
    whole = sorted(["manifest-00000001.json", "manifest.json", *files, "state.json"])
    assert copied(s3) == dict.fromkeys(named(2, 4), whole), "total_limit counts in each place"
    assert local(tmp_path / "a") == named(3, 4)

    for place, weight in run(run_processes, tiers_job.resumed, str(tmp_path / "a"), STORE, world=world):
        assert place == str(tmp_path / "a/checkpoints/checkpoint_4"), "the local one, where both have it"
        assert torch.equal(weight, weights[4])
    shutil.rmtree(tmp_path / "a/checkpoints/checkpoint_4")
    for place, weight in run(run_processes, tiers_job.resumed, str(tmp_path / "a"), STORE, world=world):
        assert place == f"{STORE}/checkpoints/checkpoint_4"
        assert torch.equal(weight, weights[4])


@pytest.mark.needs("accel-ddp")
@ranks
@pytest.mark.by_default("1")
def test_a_fresh_machine_goes_on_from_the_store_and_beyond_its_numbers(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    options = {"total_limit": 2}
    first = run(run_processes, tiers_job.trained, str(tmp_path / "a"), STORE, 2, options, world=world)[0]
    other = 3 - world
    place, weight = run(run_processes, tiers_job.resumed, str(tmp_path / "b"), STORE, world=other)[0]
    assert (place, weight.tolist()) == (f"{STORE}/checkpoints/checkpoint_1", first[1].tolist())
    run(run_processes, tiers_job.trained, str(tmp_path / "b"), STORE, 2, options, world=world)
    assert local(tmp_path / "b") == named(2, 3)
    assert list(copied(s3)) == named(2, 3), "the ancestors count for total_limit in the store"


@pytest.mark.full
def test_a_run_that_loads_nothing_goes_on_beyond_the_stores_numbers(s3: S3Server, tmp_path: Path) -> None:
    tiers_job.trained(str(tmp_path / "a"), STORE, 2)
    accelerator, *_ = tiers_job.tiered(str(tmp_path / "b"), STORE)
    accelerator.save_state()
    accelerator.end_training()
    assert local(tmp_path / "b") == named(2)
    assert list(copied(s3)) == named(0, 1, 2)


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@ranks
def test_each_copy_holds_what_was_saved_when_saves_go_on_in_the_background(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    weights = run(run_processes, tiers_job.trained, str(tmp_path), STORE, 4, {}, True, world=world)[0]
    assert list(copied(s3)) == named(0, 1, 2, 3)
    for number, weight in enumerate(weights):
        assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_{number}"), weight)


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
def test_nodes_with_disks_of_their_own_make_one_copy(s3: S3Server, tmp_path: Path, run_processes) -> None:
    options = {"store_every": 2}
    weights = run(run_processes, tiers_job.trained, str(tmp_path), STORE, 2, options | NODES, world=2)[0]
    shutil.rmtree(tmp_path / "node1/checkpoints")
    for place, weight in run(run_processes, tiers_job.resumed, str(tmp_path), STORE, NODES, world=2):
        assert place == f"{STORE}/checkpoints/checkpoint_0", "the newest that all ranks see"
        assert torch.equal(weight, weights[0])
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_0"), weights[0])


@pytest.mark.full
def test_a_damaged_local_one_is_passed_over_for_its_copy(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = tiers_job.trained(str(tmp_path), STORE, 2)
    data = tmp_path / "checkpoints/checkpoint_1/rank-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    place, weight = tiers_job.resumed(str(tmp_path), STORE)
    assert place == f"{STORE}/checkpoints/checkpoint_1"
    assert torch.equal(weight, weights[1])
    assert f"passed over: {data} is damaged" in caplog.text


@pytest.mark.full
def test_the_best_of_both_places_is_loaded(s3: S3Server, tmp_path: Path) -> None:
    def saves(folder: str, *losses: float) -> None:
        accelerator, model, _ = tiers_job.tiered(folder, STORE, keep_best="loss", total_limit=1)
        accelerator.load_state(missing_ok=True)
        for loss in losses:
            with torch.no_grad():
                accelerator.unwrap_model(model).weight.fill_(loss)
            accelerator.save_state(metrics={"loss": loss})
            accelerator.wait_for_checkpoint()
        accelerator.end_training()

    def best(folder: str) -> tuple[str, float]:
        place, weight = tiers_job.resumed(folder, STORE, {"keep_best": "loss", "total_limit": 1}, best=True)
        return place, float(weight[0, 0])

    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    saves(a, 3.0, 1.0, 2.0)
    assert best(b) == (f"{STORE}/checkpoints/checkpoint_1", 1.0)
    saves(b, 4.0)
    assert best(b) == (f"{STORE}/checkpoints/checkpoint_1", 1.0), "also of the run before, on another machine"
    saves(b, 0.5)
    assert best(b) == (f"{b}/checkpoints/checkpoint_4", 0.5)
    assert list(copied(s3)) == named(4)


@pytest.mark.needs("accel-ddp")
@ranks
@pytest.mark.by_default("2")
def test_a_local_checkpoint_is_loaded_without_the_store_by_all_ranks(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    weights = run(run_processes, tiers_job.trained, str(tmp_path), STORE, 2, world=world)[0]
    for found in run_processes(tiers_job.loaded_from_path, str(tmp_path), STORE, 0, world=world):
        assert torch.equal(found, weights[0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("folder", "store", "said"),
    [
        ("runs", "runs/copies", "give a local folder as project.project_dir, and a URL as project.store"),
        (f"{STORE}/a", STORE, "give a local folder as project.project_dir, and a URL as project.store"),
        ("runs", "s3://nowhere/run", "there is no bucket nowhere"),
        ("runs", "nobody://bucket/run", "no plugin here reads and writes nobody: URLs"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_before_training(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, store: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        tiers_job.tiered(folder, store)


# -- faults ----------------------------------------------------------------------------------------------


def refuse_writes(request: Request) -> int | None:
    return 403 if request.method in ("PUT", "POST") else None


def test_a_copy_that_fails_is_made_again_by_the_next_save(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is held on the disk until then, beyond total_limit."""
    options = {"store_every": 3, "total_limit": 1}
    accelerator, model, optimizer = tiers_job.tiered(str(tmp_path), STORE, **options)
    weight = job.weight(accelerator, model)
    s3.fault = refuse_writes
    for saves in (1, 2):
        accelerator.save_state()
        with pytest.raises(CheckpointError, match=rf"the copy to {STORE}/checkpoints/checkpoint_0 failed"):
            accelerator.wait_for_checkpoint()
        accelerator.wait_for_checkpoint()  # told once
        job.step(accelerator, model, optimizer)
        assert local(tmp_path) == named(*range(saves))
    s3.fault = lambda request: None
    accelerator.save_state()
    accelerator.wait_for_checkpoint()
    assert list(copied(s3)) == named(0)
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_0"), weight)
    accelerator.save_state()
    assert local(tmp_path) == named(3)
    accelerator.end_training()
    assert list(copied(s3)) == named(3)
    assert caplog.text.count("the next save tries again") == 2


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@ranks
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
    (said, *_) = run(run_processes, tiers_job.tried, str(tmp_path), STORE, 3, world=world)
    assert refused
    assert said == "", "a newer one was copied"
    assert local(tmp_path) == named(0, 1, 2)
    assert list(copied(s3)) == named(0, 2)
    assert not [key for key in s3.names() if "/checkpoint_1/" in key], "nothing is left of what failed"


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@ranks
def test_a_copy_that_fails_at_the_end_is_an_error_of_the_end_on_all_ranks(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    s3.fault = lambda request: 403 if request.method == "PUT" and "rank-" in request.name else None
    said = run(run_processes, tiers_job.tried, str(tmp_path), STORE, 1, world=world)
    assert len(said) == world
    for text in said:
        assert f"the copy to {STORE}/checkpoints/checkpoint_0 failed" in text
        assert "PermissionError" in text
    assert local(tmp_path) == named(0)


@pytest.mark.full
def test_a_copy_that_fails_is_told_at_the_end_and_not_by_a_load(s3: S3Server, tmp_path: Path) -> None:
    accelerator, model, optimizer = tiers_job.tiered(str(tmp_path), STORE)
    s3.fault = refuse_writes
    saved = accelerator.save_state()
    before = job.weight(accelerator, model)
    job.step(accelerator, model, optimizer)
    assert accelerator.load_state() == saved
    assert torch.equal(job.weight(accelerator, model), before)
    with pytest.raises(CheckpointError, match="the copy to .* failed"):
        accelerator.end_training()


@pytest.mark.full
def test_a_copy_is_waited_for_at_the_end_when_the_save_after_it_has_failed(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, opened = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if request.method == "PUT" and request.name.endswith(".safetensors"):
            reached.set()
            opened.wait(patience(100))

    def fail(*_: object, **__: object) -> None:
        raise OSError("no room")

    accelerator, *_ = tiers_job.tiered(str(tmp_path), STORE, store_every=9)
    s3.fault = hold
    accelerator.save_state()
    assert reached.wait(patience(100))
    monkeypatch.setattr("accel_core.checkpoint.commit.publish", fail)
    accelerator.save_state(wait=False)
    threading.Timer(1.0, opened.set).start()
    with pytest.raises(CheckpointError, match="the save to .*checkpoint_1 failed"):
        accelerator.end_training()
    assert list(copied(s3)) == named(0)


@pytest.mark.full
def test_a_copy_whose_commits_answer_is_lost_is_found_and_not_made_twice(
    s3: S3Server, tmp_path: Path
) -> None:
    """The store is away after that, until the next save."""
    away = False

    def lose(request: Request) -> int | str | None:
        nonlocal away
        if request.name == "manifest-00000001.json" and request.is_conditional and not away:
            away = True
            return "lose"
        return 403 if away else None

    accelerator, *_ = tiers_job.tiered(str(tmp_path), STORE, store_every=9, total_limit=1)
    s3.fault = lose
    accelerator.save_state()
    with pytest.raises(CheckpointError, match="the copy to .*checkpoint_0 failed"):
        accelerator.wait_for_checkpoint()
    s3.fault = lambda request: None
    s3.seen.clear()
    accelerator.save_state()
    accelerator.end_training()
    assert list(copied(s3)) == named(0)
    assert not [request for request in s3.seen if request.name.endswith(".safetensors")]
    assert accelerator.run.checkpoints.series.copies.kept.keys() == {0}, "it counts for total_limit"


@pytest.mark.full
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "state.json", "manifest-00000001.json"])
def test_a_file_that_is_listed_and_not_found_stops_a_load(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tiers_job.trained(str(tmp_path / "a"), STORE, 2)
    read = s3fs.S3FileSystem._cat_file

    async def not_found(fs: s3fs.S3FileSystem, path: str, **options: Any) -> Any:
        if path.endswith(name) and "checkpoint_1/" in path:
            raise FileNotFoundError(path)
        return await read(fs, path, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", not_found)
    s3fs.S3FileSystem.clear_instance_cache()
    accelerator, model, _ = tiers_job.tiered(str(tmp_path / "b"), STORE)
    before = job.weight(accelerator, model)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be reached: FileNotFoundError"):
        accelerator.load_state()
    assert torch.equal(job.weight(accelerator, model), before)
    accelerator.end_training()


@pytest.mark.full
def test_a_file_that_is_gone_is_damage(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = tiers_job.trained(str(tmp_path / "a"), STORE, 2)
    gone = next(key for key in s3.names() if "point_1/" in key and key.endswith(".safetensors"))
    s3.client.delete_object(Bucket=BUCKET, Key=gone)
    place, weight = tiers_job.resumed(str(tmp_path / "b"), STORE)
    assert place == f"{STORE}/checkpoints/checkpoint_0"
    assert torch.equal(weight, weights[0])
    assert "is damaged: it is not there" in caplog.text


@pytest.mark.full
def test_a_kill_in_a_copy_leaves_nothing_that_loads_and_the_next_copy_removes_it(
    s3: S3Server, tmp_path: Path, run_processes
) -> None:
    def kill(request: Request) -> str | None:
        if request.method == "PUT" and request.name.endswith(".safetensors"):
            os.kill(int(s3.content("pid")), signal.SIGKILL)
        return None

    s3.fault = kill
    with pytest.raises(ProcessError) as raised:
        run_processes(tiers_job.killed_in_a_copy, s3.url, str(tmp_path / "a"), STORE, world=1)
    assert raised.value.kind == f"exit -{signal.SIGKILL.value}"
    s3.wait_until_idle()
    s3.fault = lambda request: None
    assert copied(s3) == {}
    assert [key for key in s3.names() if "/checkpoint_0/" in key], "the copy was under way"
    accelerator, *_ = tiers_job.tiered(str(tmp_path / "b"), STORE)
    assert accelerator.load_state(missing_ok=True) is None, "a fresh machine has nothing to go on from"
    accelerator.end_training()

    place, weight = tiers_job.resumed(str(tmp_path / "a"), STORE)
    assert place == str(tmp_path / "a/checkpoints/checkpoint_0")
    assert list(copied(s3)) == named(0), "the restart has made it up"
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_0"), weight)
    assert len({key.split("/")[3] for key in s3.names() if key.startswith("run/")}) == 2


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@ranks
def test_a_kill_while_a_restart_makes_up_a_copy_leaves_it_to_the_next_restart(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    weight = run(run_processes, tiers_job.trained, str(tmp_path), STORE, 1, world=world)[0][0]
    for key in [key for key in s3.names() if "/checkpoint_0/" in key]:
        s3.client.delete_object(Bucket=BUCKET, Key=key)
    for name in ("rank-00000.safetensors", "manifest.json", "manifest-00000001.json"):

        def kill(request: Request, name: str = name) -> None:
            if request.method == "PUT" and request.name == name:
                os.kill(int(s3.content("pid")), signal.SIGKILL)

        s3.fault = kill
        with pytest.raises(ProcessError):
            run_processes(tiers_job.restarted, s3.url, str(tmp_path), STORE, world=world)
        s3.fault = lambda request: None
        s3.wait_until_idle()
        assert (name == "manifest-00000001.json") == bool(copied(s3)), "its request was done all the same"
    run(run_processes, tiers_job.resumed, str(tmp_path), STORE, world=world)
    assert list(copied(s3)) == named(0)
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_0"), weight)
    assert len({key.split("/")[3] for key in s3.names() if key.startswith("run/")}) == 2, "nothing is left"


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@ranks
def test_a_copy_that_a_killed_run_owes_is_made_by_the_restart(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    folder, options = str(tmp_path), {"store_every": 2}
    weights = run(run_processes, tiers_job.trained, folder, STORE, 3, options, world=world)[0]
    for key in [key for key in s3.names() if "/checkpoint_2/" in key]:
        s3.client.delete_object(Bucket=BUCKET, Key=key)
    run(run_processes, tiers_job.resumed, folder, STORE, options, world=world)
    assert list(copied(s3)) == named(0, 2)
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_2"), weights[2])
    run(run_processes, tiers_job.trained, folder, STORE, 2, options, world=world)
    assert list(copied(s3)) == named(0, 2, 4)


@pytest.mark.full
def test_a_copy_that_is_not_due_is_not_made_by_a_restart(s3: S3Server, tmp_path: Path) -> None:
    tiers_job.trained(str(tmp_path), STORE, 2, {"store_every": 2})
    tiers_job.resumed(str(tmp_path), STORE, {"store_every": 2})
    assert list(copied(s3)) == named(0)


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@ranks
def test_what_is_saved_when_the_job_is_told_to_stop_is_copied(
    s3: S3Server, tmp_path: Path, world: int, run_processes
) -> None:
    weight, *_ = run_processes(tiers_job.preempted, str(tmp_path), STORE, world=world)
    assert list(copied(s3)) == named(0, 2), "the node's disk may be gone"
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_2"), weight)


@pytest.mark.full
def test_a_damaged_manifest_of_another_run_stops_no_copy(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers_job.trained(str(tmp_path / "a"), STORE, 1)
    key = next(key for key in s3.names() if key.endswith("manifest-00000001.json"))
    s3.client.put_object(Bucket=BUCKET, Key=key, Body=b"{")
    accelerator, *_ = tiers_job.tiered(str(tmp_path / "b"), STORE)
    accelerator.save_state()
    accelerator.end_training()
    assert list(copied(s3)) == named(0, 1)
    assert (
        f"nothing is removed of it: s3://{key.replace('run', f'{BUCKET}/run', 1)} is damaged" in caplog.text
    )


@pytest.mark.full
def test_another_runs_copy_is_left_as_it_is(s3: S3Server, tmp_path: Path) -> None:
    one, model, optimizer = tiers_job.tiered(str(tmp_path / "a"), STORE)
    other, *_ = tiers_job.tiered(str(tmp_path / "b"), STORE)
    job.step(one, model, optimizer)
    one.save_state()
    one.wait_for_checkpoint()
    other.save_state()
    with pytest.raises(CheckpointError, match="is another run's checkpoint; it was left as it is"):
        other.wait_for_checkpoint()
    assert torch.equal(job.loaded(f"{STORE}/checkpoints/checkpoint_0"), job.weight(one, model))
    for accelerator in (one, other):
        accelerator.end_training()


@pytest.mark.full
def test_nobody_is_told_of_a_copy_as_of_a_save(s3: S3Server, tmp_path: Path) -> None:
    accelerator, *_ = tiers_job.tiered(str(tmp_path), STORE, record_every=10)
    accelerator.save_state()
    accelerator.end_training()
    (record,) = (tmp_path / "records").glob("*.jsonl")
    events = [json.loads(line) for line in record.read_text().splitlines()]
    assert [event["folder"] for event in events if event["kind"] == "checkpoint"] == [
        str(tmp_path / "checkpoints/checkpoint_0")
    ]


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
def test_ranks_go_on_together_when_one_alone_gets_no_answer(
    s3: S3Server, tmp_path: Path, run_processes
) -> None:
    """Each gives its copy up at another time; the first then waited in a collective, in vain."""
    saved = run_processes(tiers_job.saved_while_rank_0_hangs, str(tmp_path), STORE)
    assert saved == [["checkpoint_0", "checkpoint_1"]] * 2
