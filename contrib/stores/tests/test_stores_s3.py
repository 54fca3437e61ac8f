"""Checkpoints on an S3 server: whole or absent, sent once, read by ranges."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import stored_job as job
import torch
from s3_server import BUCKET, SECRET, Request, S3Server
from safetensors.torch import load as tensors_in

from accel_core import (
    Checkpoint,
    CheckpointError,
    InitProcessGroupKwargs,
    Leaf,
    open_checkpoint,
    storage_at,
)
from accel_core.storage.tensors import fill
from accel_testing.patience import patience

URL = f"s3://{BUCKET}/run/ck"
WIDTH = 4096
"""Of a model whose checkpoint has some 25 MB: several blocks for each of two ranks."""


def received(s3: S3Server) -> int:
    return sum(size for request in s3.seen if request.method == "GET" for size in request.answered)


def writes(s3: S3Server) -> list[Request]:
    return [request for request in s3.seen if request.method == "PUT"]


# -- the proof that the row rests on ---------------------------------------------------------------


def test_a_second_create_is_refused_and_the_first_stays(s3: S3Server) -> None:
    folder = storage_at(f"s3://{BUCKET}/folder")
    folder.create("one", b"first")
    with pytest.raises(FileExistsError):
        folder.create("one", b"second")
    assert s3.content("folder/one") == b"first"
    assert [request.is_conditional for request in writes(s3) if request.name == "one"] == [True, True]


def test_a_server_that_accepts_a_second_create_is_refused_before_anything_is_sent(s3: S3Server) -> None:
    s3.fault = lambda request: "accept" if request.is_conditional else None
    with pytest.raises(CheckpointError, match=r"this store created one file twice.*If-None-Match"):
        job.saved(URL, 1)
    assert s3.names() == []
    assert len(writes(s3)) == 2


# -- save and load -----------------------------------------------------------------------------------


@pytest.mark.needs("accel-ddp")
def test_what_two_ranks_save_one_rank_loads_and_the_bytes_go_once(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_processes
) -> None:
    run_processes(job.saved, str(tmp_path / "local"), 2, WIDTH, world=2)
    local = sum(path.stat().st_size for path in (tmp_path / "local").rglob("*") if path.is_file())

    first, second = run_processes(job.saved, URL, 2, WIDTH, world=2)
    sent, requests = sum(request.sent for request in writes(s3)), len(s3.seen)
    assert torch.equal(first, second)
    assert sent <= 1.01 * local
    assert requests <= 30

    s3.seen.clear()
    (own := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    assert torch.equal(job.loaded(URL, WIDTH), first)
    assert received(s3) <= 1.01 * local
    assert len(s3.seen) <= 18, "lists, small files, a claim, and 16 MiB of data each"
    assert [path.name for path in (own / f"accel-{os.getuid()}").iterdir()] == ["lock"], "nothing stays"


@pytest.mark.needs("accel-ddp")
def test_two_ranks_of_a_node_load_what_one_rank_saved_and_each_byte_comes_once(
    s3: S3Server, run_processes
) -> None:
    expected = job.saved(URL, 1, WIDTH)
    size = sum(len(s3.content(key)) for key in s3.names())
    s3.seen.clear()
    for found in run_processes(job.loaded, URL, WIDTH, world=2):
        assert torch.equal(found, expected)
    assert received(s3) <= 1.01 * size
    assert len(s3.seen) <= 24


def test_a_part_of_a_tensor_takes_the_blocks_that_it_lies_in(s3: S3Server) -> None:
    """As each rank takes its part of what is split otherwise than it was saved."""
    job.saved(URL, 1, WIDTH)
    with open_checkpoint(storage_at(URL)) as opened:
        checkpoint = Checkpoint.with_tensors(opened)
        (unit,) = checkpoint.state["units"]
        stored, part = checkpoint.tensors[unit, "model/weight"], torch.empty(256, WIDTH)
        leaf = Leaf(kind="parameter", global_shape=stored.shape, shards=(((256, 0), part),))
        s3.seen.clear()
        checkpoint.verify(sorted(checkpoint.blocks_of([(stored, leaf)])))
        assert received(s3) == 8 << 20, "4 MiB, in two blocks"
        fill([(stored, leaf)])
        assert received(s3) == 8 << 20
        assert torch.equal(part, stored.tensor()[256:])


def test_a_disk_without_room_for_what_comes_is_told_and_no_older_one_is_taken(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, model, optimizer = job.numbered(f"s3://{BUCKET}/run")
    for _ in range(2):
        job.step(accelerator, model, optimizer)
        accelerator.save_state()
    before = job.weight(accelerator, model)
    job.step(accelerator, model, optimizer)
    now = job.weight(accelerator, model)
    usage = shutil.disk_usage("/")._replace(free=1000)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(CheckpointError, match=r"has room for 1000 bytes, and \d+ are needed; set TMPDIR"):
            accelerator.load_state()
    assert torch.equal(job.weight(accelerator, model), now)
    accelerator.load_state()
    assert torch.equal(job.weight(accelerator, model), before)
    accelerator.end_training()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_rank_that_sends_for_longer_than_the_timeout_is_waited_for(s3: S3Server, run_processes) -> None:
    s3.fault = lambda request: time.sleep(12) if request.name.startswith("rank-00001") else None
    options = {"kwargs_handlers": [InitProcessGroupKwargs(timeout=timedelta(seconds=8))]}
    saved, _ = run_processes(job.saved, URL, 1, 64, False, options, world=2)
    assert torch.equal(job.loaded(URL), saved)


def test_a_save_in_the_background_is_whole_when_training_ends(s3: S3Server) -> None:
    expected = job.saved(URL, 3, background=True)
    assert torch.equal(job.loaded(URL), expected)


def test_a_save_under_the_same_name_replaces_the_one_before(s3: S3Server) -> None:
    job.saved(URL, 1)
    before = set(s3.names())
    expected = job.saved_again(URL, 2)
    assert torch.equal(job.loaded(URL), expected)
    now = s3.names()
    assert not before & set(now)
    assert len(now) == len(before)


def test_a_checkpoint_copied_to_a_disk_is_an_ordinary_one(s3: S3Server, tmp_path: Path) -> None:
    expected = job.saved(URL, 2)
    for key in s3.names():
        path = tmp_path / key.removeprefix("run/ck/")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(s3.content(key))
    assert torch.equal(job.loaded(str(tmp_path)), expected)


def test_a_local_checkpoint_copied_to_the_store_is_an_ordinary_one(s3: S3Server, tmp_path: Path) -> None:
    local = tmp_path / "local"
    expected = job.saved(str(local), 2)
    for path in (path for path in local.rglob("*") if path.is_file()):
        s3.client.put_object(Bucket=BUCKET, Key=f"run/ck/{path.relative_to(local)}", Body=path.read_bytes())
    assert torch.equal(job.loaded(URL), expected)
    expected = job.saved(URL, 1)
    assert torch.equal(job.loaded(URL), expected)


def test_numbered_checkpoints_are_kept_and_the_newest_valid_one_is_loaded(
    s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model, optimizer = job.numbered(f"s3://{BUCKET}/run", total_limit=2)
    weights = []
    for _ in range(3):
        job.step(accelerator, model, optimizer)
        weights.append(job.weight(accelerator, model))
        last = accelerator.save_state()
    assert last == f"s3://{BUCKET}/run/checkpoints/checkpoint_2"
    assert {key.split("/")[2] for key in s3.names()} == {"checkpoint_1", "checkpoint_2"}
    assert accelerator.load_state().directory == last
    accelerator.end_training()

    gone = next(key for key in s3.names() if "checkpoint_2" in key and key.endswith(".safetensors"))
    s3.client.delete_object(Bucket=BUCKET, Key=gone)
    accelerator, model, _ = job.numbered(f"s3://{BUCKET}/run")
    assert str(accelerator.load_state()).endswith("checkpoint_1")
    assert torch.equal(job.weight(accelerator, model), weights[1])
    assert f"passed over: s3://{gone.replace('run', f'{BUCKET}/run', 1)} is damaged" in caplog.text
    accelerator.end_training()


def test_weights_are_written_for_other_libraries_and_not_mixed_with_others(s3: S3Server) -> None:
    accelerator, model, _ = job.made()
    accelerator.save_model(model, f"s3://{BUCKET}/weights")
    found = tensors_in(s3.content("weights/model.safetensors"))
    assert torch.equal(found["weight"], job.weight(accelerator, model))
    with pytest.raises(CheckpointError, match=r"model.safetensors exists, and was left as it is"):
        accelerator.save_model(model, f"s3://{BUCKET}/weights", max_shard_size=1000)
    accelerator.save_model(model, f"s3://{BUCKET}/parts", max_shard_size=1000)
    assert writes(s3)[-1].name == "model.safetensors.index.json"
    accelerator.end_training()


def test_no_object_holds_a_credential(s3: S3Server) -> None:
    accelerator, *_ = job.numbered(f"s3://{BUCKET}/run")
    accelerator.save_state()
    accelerator.end_training()
    assert not [key for key in s3.names() if SECRET.encode() in s3.content(key)]


# -- two writers --------------------------------------------------------------------------------------


def test_of_two_writers_one_wins_and_the_other_says_so(s3: S3Server, run_processes) -> None:
    """Both are held at the commit until both are there."""
    both = threading.Barrier(2, timeout=patience(120))

    def hold(request: Request) -> None:
        if request.name == "manifest-00000001.json" and request.is_conditional:
            both.wait()

    s3.fault = hold
    with ThreadPoolExecutor(2) as pool:
        said = [
            answer.result()[0]
            for answer in [pool.submit(run_processes, job.tried, URL, steps, world=1) for steps in (1, 2)]
        ]
    winner = said.index("")
    assert "has appeared while this save was written: another run saves there" in said[1 - winner]
    assert torch.equal(job.loaded(URL), job.saved("memory://other/ck", winner + 1))
    assert len([key for key in s3.names() if key.endswith(".safetensors")]) == 1, "the loser's are gone"


def test_a_commit_whose_answer_is_lost_is_found_to_be_done(s3: S3Server) -> None:
    lost: list[Request] = []

    def lose(request: Request) -> str | None:
        if request.name == "manifest-00000001.json" and request.is_conditional and not lost:
            lost.append(request)
            return "lose"
        return None

    s3.fault = lose
    expected = job.saved(URL, 2)
    assert lost
    assert torch.equal(job.loaded(URL), expected)
