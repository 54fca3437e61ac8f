"""A folder that is in use is not removed: claims of this machine, of others, and of dead processes."""

from __future__ import annotations

import time

import pytest
import stored_job as job
import torch
from s3_server import BUCKET, S3Server

from accel_core import storage_at
from accel_stores import bucket

URL = f"s3://{BUCKET}/run/ck"


def claimed(s3: S3Server, words: str) -> bool:
    """Put a claim with this content into a folder; return whether it counts."""
    s3.client.put_object(Bucket=BUCKET, Key="run/ck/claim-0123456789abcdef", Body=words.encode())
    return storage_at(URL).is_claimed()


def test_a_claim_of_another_machine_counts_for_a_day(s3: S3Server) -> None:
    now = time.time()
    assert claimed(s3, f"boot host 1:2 {now:.0f}\n")
    assert not claimed(s3, f"boot host 1:2 {now - bucket.CLAIM_SECONDS - 60:.0f}\n")
    assert claimed(s3, "what nobody writes"), "it may be of a later version"


def test_a_claim_of_a_process_that_is_gone_from_this_machine_does_not_count(s3: S3Server) -> None:
    folder = storage_at(URL)
    with folder.claim():
        (key,) = s3.names()
        content = s3.content(key)
        assert folder.is_claimed()
    assert not claimed(s3, content.decode())


def test_a_folder_that_is_read_is_not_removed_by_a_save(s3: S3Server) -> None:
    old = job.saved(URL, 1)
    (save_id,) = {key.split("/")[2] for key in s3.names() if key.count("/") == 3}
    with storage_at(URL).at(save_id).claim():
        new = job.saved(URL, 2)
        assert [key for key in s3.names() if save_id in key and key.endswith(".safetensors")]
    assert torch.equal(job.loaded(URL), new)
    assert not torch.equal(old, new)
    job.saved(URL, 1)
    assert not [key for key in s3.names() if save_id in key]


@pytest.mark.full
def test_total_limit_passes_over_what_is_read(s3: S3Server) -> None:
    accelerator, *_ = job.numbered(f"s3://{BUCKET}/run", total_limit=1)
    accelerator.save_state()
    (save_id,) = {key.split("/")[3] for key in s3.names() if key.count("/") == 4}
    with storage_at(f"s3://{BUCKET}/run/checkpoints/checkpoint_0").at(save_id).claim():
        accelerator.save_state()
        assert {key.split("/")[2] for key in s3.names()} == {"checkpoint_0", "checkpoint_1"}
    accelerator.save_state()
    assert {key.split("/")[2] for key in s3.names()} == {"checkpoint_2"}
    accelerator.end_training()
