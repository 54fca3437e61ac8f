"""The copy on a node of what is read from a store: shared by its ranks, removed, never wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import stored_job as job
import torch
from s3_server import BUCKET, S3Server

from accel_core import CheckpointError, Storage, storage_at
from accel_stores.node import BLOCK_BYTES

CONTENT = os.urandom(4 * BLOCK_BYTES + 1000)
WIDTH = 4096
"""Of a model whose checkpoint has some 25 MB."""


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fsspec.filesystem("memory").store.clear()
    yield tmp_path / f"accel-{os.getuid()}"
    fsspec.filesystem("memory").store.clear()


def written(folder: Storage) -> Storage:
    with folder.writer("data") as file:
        file.write(CONTENT)
    return folder


def names(spool: Path) -> list[str]:
    """Return the names of the folders there."""
    return [path.name for path in spool.iterdir() if path.is_dir()]


def read(folder: Storage, start: int, size: int) -> bytes:
    content = bytearray(size)
    folder.read("data", start, memoryview(content))
    return bytes(content)


def test_a_block_comes_once_and_goes_with_the_copy(s3: S3Server, spool: Path) -> None:
    near = written(storage_at(f"s3://{BUCKET}/run")).local_cache("word")
    s3.seen.clear()
    assert read(near, BLOCK_BYTES + 5, 10) == CONTENT[BLOCK_BYTES + 5 :][:10]
    assert read(near, BLOCK_BYTES, 100) == CONTENT[BLOCK_BYTES:][:100]
    assert [size for each in s3.seen if each.name == "data" for size in each.answered] == [BLOCK_BYTES]
    near.fetch("data", [(0, 10), (2 * BLOCK_BYTES, 2 * BLOCK_BYTES)])
    assert read(near, 0, len(CONTENT)) == CONTENT
    assert sum(size for each in s3.seen if each.name == "data" for size in each.answered) == len(CONTENT)
    assert len(names(spool)) == 1
    del near
    assert names(spool) == []


def read_at_once(url: str) -> bool:
    """Read all of a file by each rank at the same time."""
    accelerator, *_ = job.made()
    near = storage_at(url).local_cache("word")
    accelerator.wait_for_everyone()
    content = read(near, 0, len(CONTENT))
    accelerator.end_training()
    return len(content) == len(CONTENT)


@pytest.mark.needs("accel-ddp")
def test_ranks_that_read_a_block_at_once_bring_it_once(s3: S3Server, run_processes) -> None:
    written(storage_at(f"s3://{BUCKET}/run"))
    s3.seen.clear()
    assert run_processes(read_at_once, f"s3://{BUCKET}/run", world=2) == [True, True]
    assert sum(size for each in s3.seen if each.name == "data" for size in each.answered) == len(CONTENT)
    assert Counter(each.name for each in s3.seen)[BUCKET] <= 2, "the list comes once too"


def test_a_block_that_a_cleaner_has_removed_comes_again(s3: S3Server, spool: Path) -> None:
    folder = written(storage_at(f"s3://{BUCKET}/run"))
    near = folder.local_cache("word")
    near.fetch("data", [(0, len(CONTENT))])
    for path in spool.glob("near-*/data.*"):
        path.unlink()
    assert read(near, 0, len(CONTENT)) == CONTENT


@pytest.mark.full
def test_a_disk_that_gets_full_is_told_and_what_is_there_stays_right(
    s3: S3Server, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = written(storage_at(f"s3://{BUCKET}/run")).local_cache("word")
    usage = shutil.disk_usage("/")._replace(free=BLOCK_BYTES)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage)
        assert read(near, 0, 10) == CONTENT[:10], "there is room for this one"
        with pytest.raises(OSError, match=r"has room for \d+ bytes, and \d+ are needed; set TMPDIR"):
            near.fetch("data", [(0, len(CONTENT))])
    assert read(near, 0, len(CONTENT)) == CONTENT


@pytest.mark.full
def test_what_a_killed_process_has_left_is_removed_by_the_next_one(
    spool: Path, start_command, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = textwrap.dedent(
        """
        import sys
        from accel_core import storage_at
        folder = storage_at("memory://bucket/run")
        with folder.writer("data") as file:
            file.write(bytes(10))
        near = folder.local_cache("word")
        near.fetch("data", [(0, 10)])
        claim = folder.claim()
        claim.__enter__()
        print("waits", flush=True)
        sys.stdin.read()
        """
    )
    environment = os.environ | {"TMPDIR": str(spool.parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with start_command([sys.executable, "-c", code], env=environment, **pipes) as process:
        assert process.stdout.readline() == "waits\n"
        written(storage_at("memory://bucket/run"))
        assert len(names(spool)) == 2, "it is alive"
        process.send_signal(signal.SIGKILL)
    written(storage_at("memory://bucket/run"))
    assert names(spool) == []


@pytest.mark.full
def test_no_copy_is_left_of_a_damaged_checkpoint(spool: Path) -> None:
    accelerator, *_ = job.numbered("memory://bucket/run")
    for _ in range(2):
        accelerator.save_state()
    files = fsspec.filesystem("memory").store
    for key in [key for key in files if "/checkpoint_1/" in key and key.endswith(".safetensors")]:
        files[key].getbuffer()[-3] ^= 255
    assert str(accelerator.load_state()).endswith("checkpoint_0")
    assert names(spool) == []
    accelerator.end_training()


@pytest.mark.full
def test_a_load_that_failed_leaves_no_block_to_the_next(spool: Path) -> None:
    expected = job.saved("memory://bucket/ck", 1)
    accelerator, model, _ = job.made()
    files = fsspec.filesystem("memory").store
    (key,) = [key for key in files if key.endswith(".safetensors")]
    files[key].getbuffer()[-3] ^= 255
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        accelerator.load_state("memory://bucket/ck")
    files[key].getbuffer()[-3] ^= 255
    accelerator.load_state("memory://bucket/ck")
    assert torch.equal(job.weight(accelerator, model), expected)
    assert caught.value.__traceback__ is not None, "what it refers to is alive"
    accelerator.end_training()


@pytest.mark.full
def test_a_folder_that_cannot_be_made_is_told_and_no_older_one_is_taken(spool: Path) -> None:
    accelerator, *_ = job.numbered("memory://bucket/run")
    for _ in range(2):
        accelerator.save_state()
    shutil.rmtree(spool)
    spool.touch()
    with pytest.raises(CheckpointError, match="cannot be used: .*set TMPDIR"):
        accelerator.load_state()
    accelerator.end_training()


@pytest.mark.full
def test_the_folder_is_closed_to_other_users_and_theirs_is_not_used(spool: Path) -> None:
    job.saved("memory://bucket/ck", 1)
    spool.chmod(0o777)
    job.loaded("memory://bucket/ck")
    assert spool.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(spool)
    spool.symlink_to(spool.parent)
    with pytest.raises(CheckpointError, match="is not this user's.*set TMPDIR"):
        job.loaded("memory://bucket/ck")
