"""The package, installed, against the conformance kit, as its author would run it."""

from __future__ import annotations

from pathlib import Path


def test_the_kit_is_green_from_an_empty_folder(tmp_path: Path, conform) -> None:
    assert conform(tmp_path, "tensorboard").skipped == set()
