"""The installed package against the conformance kit."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["report", "watch", "monitor", "replicas"])
def test_it_conforms(tmp_path: Path, name: str, conform) -> None:
    assert conform(tmp_path, name).skipped == set()
