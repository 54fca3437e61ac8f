"""The folder of a node for blocks that come from a store: removed, without room, of a rank that fails."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import fsspec
import pytest
import stored_job as job
import torch
from s3_server import BUCKET, S3Server

from accel_core import CheckpointError, InitProcessGroupKwargs
from accel_core.checkpoint.node_copy import NodeCopy
from accel_core.checkpoint.reader import CheckpointFiles

pytestmark = pytest.mark.full

WIDTH = 4096
"""Of a model whose checkpoint has some 25 MB: two requests."""


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fsspec.filesystem("memory").store.clear()
    yield tmp_path
    fsspec.filesystem("memory").store.clear()


def test_a_file_that_is_removed_while_blocks_come_is_not_read_as_zeros(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.saved("memory://bucket/ck", 1, WIDTH)
    keep, kept = NodeCopy.keep, list[str]()

    def removed_once(self: NodeCopy, name: str, *rest: int | memoryview) -> None:
        keep(self, name, *rest)  # type: ignore[arg-type]
        kept.append(name)
        if len(kept) == 1:  # as a cleaner of the temporary folder does
            (self.folder / name).unlink()

    monkeypatch.setattr(NodeCopy, "keep", removed_once)
    monkeypatch.setattr("accel_core.checkpoint.reader.AT_ONCE", 1)
    accelerator, model, _ = job.made(WIDTH)
    before = job.weight(accelerator, model)
    with pytest.raises(CheckpointError, match="could not be written"):
        accelerator.load_state("memory://bucket/ck")
    assert torch.equal(job.weight(accelerator, model), before)
    assert [*spool.glob("accel-*/*")] == []
    accelerator.end_training()


def test_the_folder_of_a_damaged_one_is_gone_before_an_older_one_comes(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, *_ = job.numbered("memory://bucket/run")
    for _ in range(2):
        accelerator.save_state()
    files = fsspec.filesystem("memory").store
    for key in [key for key in files if "/checkpoint_1/" in key and key.endswith(".safetensors")]:
        files[key].getbuffer()[-3] ^= 255
    folders, verify = list[int](), CheckpointFiles.verify

    def counted(self: CheckpointFiles, *given: int) -> None:
        folders.append(len([*spool.glob("accel-*/*")]))
        verify(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointFiles, "verify", counted)
    assert str(accelerator.load_state()).endswith("checkpoint_0")
    assert folders == [1, 1]
    accelerator.end_training()


def test_a_folder_that_cannot_be_made_is_told_and_no_older_one_is_taken(spool: Path) -> None:
    accelerator, *_ = job.numbered("memory://bucket/run")
    for _ in range(2):
        accelerator.save_state()
    for left in spool.glob("accel-*"):
        shutil.rmtree(left)
        left.touch()
    with pytest.raises(CheckpointError, match=r"could not be written: .*\nset TMPDIR"):
        accelerator.load_state()
    accelerator.end_training()


def test_the_folder_is_closed_to_other_users_and_theirs_is_not_used(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.saved("memory://bucket/ck", 1)
    (root,) = spool.glob("accel-*")
    root.chmod(0o777)
    job.loaded("memory://bucket/ck")
    assert root.stat().st_mode & 0o777 == 0o700
    root.rmdir()
    root.symlink_to(spool)
    with pytest.raises(CheckpointError, match=r"is not this user's\nset TMPDIR"):
        job.loaded("memory://bucket/ck")


def late(url: str, free: int) -> bool:
    """Load on a disk with this room; rank 1 comes late, and rank 0 has written its share."""
    accelerator, *_ = job.made(WIDTH)
    usage, verify = shutil.disk_usage, CheckpointFiles.verify

    def left(path: Path) -> object:
        used = sum(each.stat().st_blocks * 512 for each in Path(path).rglob("*") if each.is_file())
        return usage(path)._replace(free=free - used)

    def verified(self: CheckpointFiles, *given: int) -> None:
        time.sleep(2 * accelerator.process_index)
        verify(self, *given)  # type: ignore[arg-type]

    shutil.disk_usage = left  # type: ignore[assignment]
    CheckpointFiles.verify = verified  # type: ignore[assignment]
    accelerator.load_state(url)
    accelerator.end_training()
    return True


@pytest.mark.needs("accel-ddp")
def test_a_disk_with_room_for_what_comes_is_enough_for_a_rank_that_comes_late(
    s3: S3Server, run_processes
) -> None:
    job.saved(f"s3://{BUCKET}/run/ck", 1, WIDTH)
    assert run_processes(late, f"s3://{BUCKET}/run/ck", 30_000_000, world=2) == [True, True]


def failing_first(url: str) -> str:
    """Fail on rank 1 while rank 0 fetches for longer than the timeout; return the error."""
    options = {"kwargs_handlers": [InitProcessGroupKwargs(timeout=timedelta(seconds=8))]}
    accelerator, *_ = job.made(WIDTH, **options)
    bring = CheckpointFiles._bring

    def brought(self: CheckpointFiles, blocks: list[tuple[int, int]]) -> None:
        if accelerator.process_index:
            raise CheckpointError("block 5 is not what was written")
        time.sleep(14)
        bring(self, blocks)

    CheckpointFiles._bring = brought  # type: ignore[assignment, method-assign]
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(url)
    accelerator.end_training()
    return str(caught.value)


@pytest.mark.needs("accel-ddp")
def test_a_damaged_block_is_told_to_a_rank_that_fetches_for_longer_than_the_timeout(
    s3: S3Server, run_processes
) -> None:
    job.saved(f"s3://{BUCKET}/run/ck", 1, WIDTH)
    for said in run_processes(failing_first, f"s3://{BUCKET}/run/ck", world=2):
        assert said.endswith("block 5 is not what was written")
