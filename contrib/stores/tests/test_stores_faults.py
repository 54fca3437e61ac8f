"""Faults of an S3 server, and kills: nothing half loads, nothing committed is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import held_job
import pytest
import stored_job as job
import torch
from s3_server import BUCKET, Request, S3Server

from accel_core import CheckpointError
from accel_testing import ProcessError

URL = f"s3://{BUCKET}/run/ck"
RUN = f"s3://{BUCKET}/run"
WRITES = ("PUT", "POST", "DELETE")


def killed_at(
    run_processes, s3: S3Server, number: int, methods: Sequence[str], do: Any, *, cut: bool
) -> bool:
    """Run `do(endpoint, url)` in a process that is killed when it sends its request of this number.

    The request is done nevertheless, or `cut` in the middle.
    """
    count = 0

    def kill(request: Request) -> str | None:
        nonlocal count
        if request.name == "pid" or request.method not in methods:
            return None
        count += 1
        if count == number:
            os.kill(int(s3.content("pid")), signal.SIGKILL)
        return "cut" if cut and count >= number else None

    s3.fault = kill
    try:
        run_processes(do, s3.url, URL if do is told_who else RUN, world=1)
    except ProcessError as error:
        if error.kind != f"exit -{signal.SIGKILL.value}":
            raise
        return True
    finally:
        s3.wait_until_idle()
        s3.fault = lambda request: None
    return False


def told_who(endpoint: str, url: str) -> None:
    """Put this process's number where the server finds it, then save."""
    import boto3

    boto3.client("s3", endpoint_url=endpoint).put_object(
        Bucket=BUCKET, Key="pid", Body=str(os.getpid()).encode()
    )
    job.saved_again(url, 1)


@pytest.mark.parametrize(
    ("numbers", "cuts"),
    [((3, 8), (False,)), pytest.param(range(1, 30), (False, True), marks=pytest.mark.full)],
    ids=["two", "all"],
)
@pytest.mark.timeout(1800)
def test_a_kill_at_any_write_leaves_the_old_checkpoint_or_the_new_one(
    s3: S3Server, numbers: Sequence[int], cuts: Sequence[bool], run_processes
) -> None:
    old = job.saved(URL, 1)
    job.saved("memory://twin/ck", 1)
    new = job.saved_again("memory://twin/ck", 1)
    ended = set()
    for cut, number in product(cuts, numbers):
        if cut in ended:
            continue  # it has fewer
        if not killed_at(run_processes, s3, number, WRITES, told_who, cut=cut):
            ended.add(cut)
        found = job.loaded(URL)
        assert torch.equal(found, old) or torch.equal(found, new), number
        assert cut not in ended or torch.equal(found, new), "a save that nobody killed is committed"
        job.saved(URL, 1)
        files = Counter(key.count("/") for key in s3.names() if key.startswith("run/"))
        assert files == {2: 1, 3: 3}, f"what the kill at write {number} has left is removed by the next save"
    assert len(numbers) == 2 or ended == set(cuts), "each write of a save has had its turn"


@pytest.mark.full
@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=pytest.mark.full)])
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_at_random_goes_on_from_what_was_committed_last(
    s3: S3Server, caplog: pytest.LogCaptureFixture, kills: int, run_processes
) -> None:
    chance, last = random.Random(0), -1
    for _ in range(kills):
        number, cut = chance.randrange(20, 80), chance.random() < 0.5
        assert killed_at(run_processes, s3, number, ("GET", "HEAD", *WRITES), job.endless, cut=cut)
        before = newest_committed(s3)
        accelerator, model, _ = job.numbered(RUN)
        found = accelerator.load_state(missing_ok=True)
        loaded = -1 if found is None else int(str(found).rpartition("_")[2])
        assert last <= before <= loaded <= newest_committed(s3), "a request may be done after its sender died"
        assert loaded < 0 or (job.weight(accelerator, model) == loaded).all()
        last = loaded
        accelerator.end_training()
    assert last >= 0
    assert "is damaged" not in caplog.text, "what is committed is whole"


def newest_committed(s3: S3Server) -> int:
    keys = [key.split("/") for key in s3.names()]
    return max((int(key[2].rpartition("_")[2]) for key in keys if "manifest-" in key[-1]), default=-1)


@pytest.mark.full
def test_a_half_uploaded_checkpoint_is_none(s3: S3Server) -> None:
    s3.client.put_object(Bucket=BUCKET, Key=f"run/ck/save-{'0' * 16}/rank-00000.json", Body=b"{")
    accelerator, *_ = job.made()
    assert accelerator.load_state(URL, missing_ok=True) is None
    with pytest.raises(CheckpointError, match="s3://bucket/run/ck is not a checkpoint"):
        accelerator.load_state(URL)
    accelerator.end_training()


@pytest.mark.parametrize("status", [500, 503, "cut"])
@pytest.mark.by_default
def test_what_fails_now_and_then_is_tried_again_by_the_library(s3: S3Server, status: int | str) -> None:
    seen: Counter[tuple[str, str]] = Counter()

    def fail_first(request: Request) -> int | str | None:
        seen[request.method, request.path] += 1
        return status if seen[request.method, request.path] == 1 and request.name.startswith("rank") else None

    s3.fault = fail_first
    expected = job.saved(URL, 2)
    assert torch.equal(job.loaded(URL), expected)


@pytest.mark.full
def test_a_store_that_holds_something_else_is_no_store_without_a_checkpoint(s3: S3Server) -> None:
    accelerator, *_ = job.made()
    assert accelerator.load_state(URL, missing_ok=True) is None
    s3.client.put_object(Bucket=BUCKET, Key="run/ck/weights.bin", Body=b"1")
    with pytest.raises(CheckpointError, match=r"run/ck is not a checkpoint: manifest-N.json is missing\n"):
        accelerator.load_state(URL, missing_ok=True)
    accelerator.end_training()


@pytest.mark.full
def test_a_save_that_may_remove_nothing_ends_and_says_what_stays(
    s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    s3.fault = lambda request: 403 if request.method in ("POST", "DELETE") else None
    job.saved(URL, 1)
    expected = job.saved(URL, 2)
    assert torch.equal(job.loaded(URL), expected)
    assert "what this save replaces could not be removed" in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("status", [403, 400], ids=["no-right-to-the-data", "credentials-that-expire"])
def test_a_save_that_cannot_be_sent_fails_and_leaves_the_old_one(s3: S3Server, status: int) -> None:
    expected = job.saved(URL, 1)
    before = sorted(s3.names())
    failed: list[Request] = []

    def fail(request: Request) -> int | None:
        if request.method == "PUT" and request.name.endswith(".safetensors"):
            failed.append(request)
        elif status == 403 or not failed:
            return None
        return status

    s3.fault = fail
    accelerator, model, optimizer = job.made()
    job.step(accelerator, model, optimizer)
    accelerator.save_state(URL, wait=False)
    with pytest.raises(
        CheckpointError, match=rf"(?s)the save to {URL} failed; .* still whole.*PermissionError"
    ):
        accelerator.wait_for_checkpoint()
    accelerator.end_training()
    s3.fault = lambda request: None
    assert torch.equal(job.loaded(URL), expected)
    job.saved(URL, 1)
    assert len(s3.names()) == len(before), "the next save has removed what this one could not"


def test_a_damaged_block_is_named_and_nothing_is_changed(s3: S3Server) -> None:
    job.saved(URL, 1)
    key = next(key for key in s3.names() if key.endswith(".safetensors"))
    content = bytearray(s3.content(key))
    content[-7] ^= 1
    s3.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
    accelerator, model, _ = job.made()
    before = job.weight(accelerator, model)
    with pytest.raises(
        CheckpointError, match=rf"s3://{BUCKET}/{key} is damaged: block 0 is not what was written"
    ):
        accelerator.load_state(URL)
    assert torch.equal(job.weight(accelerator, model), before)
    accelerator.end_training()


def loaded_in_vain(url: str) -> tuple[str, bool]:
    """Return the error, and True if nothing was changed."""
    accelerator, model, _, _, average = held_job.made()
    before = job.weight(accelerator, model)
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(url)
    same = torch.equal(job.weight(accelerator, model), before) and not average.values.any()
    accelerator.end_training()
    return str(caught.value), bool(same)


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_a_damaged_block_of_a_registered_object_is_named_and_nothing_is_changed(
    s3: S3Server, world: int, run_processes
) -> None:
    run_processes(held_job.saved, URL, world=world)
    key = next(key for key in s3.names() if key.endswith("00000.safetensors"))
    content = bytearray(s3.content(key))
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    start = next(each["data_offsets"][0] for name, each in header.items() if name.startswith("registered"))
    content[8 + size + start + 2_000_000] ^= 1
    s3.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
    for said, is_unchanged in run_processes(loaded_in_vain, URL, world=world):
        assert f"s3://{BUCKET}/{key} is damaged: block" in said
        assert is_unchanged


@pytest.mark.full
@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "s3://nowhere/ck",
            "s3://nowhere/ck cannot be saved: FileNotFoundError: there is no bucket nowhere",
        ),
        ("http://127.0.0.1:9/ck", "http://127.0.0.1:9/ck cannot be saved"),
        ("gs://bucket/ck", "gs: URLs"),
    ],
)
def test_a_place_that_cannot_be_saved_into_is_said_before_anything_is_sent(
    s3: S3Server, url: str, said: str
) -> None:
    accelerator, *_ = job.made()
    with pytest.raises(CheckpointError, match=said):
        accelerator.save_state(url)
    accelerator.end_training()


@pytest.mark.full
def test_a_store_that_has_no_create_takes_no_checkpoint(s3: S3Server) -> None:
    accelerator, *_ = job.made()
    with pytest.raises(CheckpointError, match=r"http: has no way to create a file only once; save to a disk"):
        accelerator.save_state(f"{s3.url}/{BUCKET}/ck")
    accelerator.end_training()


@pytest.mark.full
def test_a_project_whose_bucket_is_not_there_is_refused_before_training(s3: S3Server) -> None:
    with pytest.raises(CheckpointError, match="there is no bucket nowhere"):
        job.numbered("s3://nowhere/run")
    accelerator, *_ = job.numbered(RUN)
    accelerator.end_training()


def test_missing_rights_are_said(s3: S3Server) -> None:
    s3.fault = lambda request: 403
    accelerator, *_ = job.made()
    with pytest.raises(CheckpointError, match=r"cannot be saved: PermissionError.*\nsave to a folder"):
        accelerator.save_state(URL)
    accelerator.end_training()
