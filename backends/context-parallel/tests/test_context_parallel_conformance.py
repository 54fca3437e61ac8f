"""The package, installed, against the conformance kit, as its author would run it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_kit_is_green_where_all_ranks_share_sequences(tmp_path: Path, conform) -> None:
    options = ("--accel-set", "parallelism.cp=-1", "--accel-world", "1,2")
    assert conform(tmp_path, "ddp+cp", *options).skipped == set()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_kit_is_green_where_pairs_of_ranks_do(tmp_path: Path, conform) -> None:
    options = ("--accel-set", "parallelism.cp=2", "--accel-world", "4", "--accel-level", "3,4")
    assert conform(tmp_path, "ddp+cp", *options).skipped == set()
