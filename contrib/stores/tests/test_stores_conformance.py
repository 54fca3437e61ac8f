"""The installed package against the conformance kit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_server import REPOSITORY, HubServer
from s3_server import BUCKET, S3Server


@pytest.mark.parametrize("url", [f"s3://{BUCKET}/kit", "memory://kit", f"hf://{REPOSITORY}/kit"])
@pytest.mark.by_default("s3://bucket/kit", "memory://kit")
def test_it_conforms(s3: S3Server, hub: HubServer, tmp_path: Path, url: str, conform) -> None:
    assert conform(tmp_path, "fsspec", "--accel-store", url).skipped == set()
