"""The package, installed, against the conformance kit, as its author would run it."""

from __future__ import annotations

from pathlib import Path


def test_the_kit_is_green_from_an_empty_folder(tmp_path: Path, conform) -> None:
    assert "0 failed, 0 xfailed, 0 skipped" in conform(tmp_path, "tensorboard", "--accel-level", "0,1")
