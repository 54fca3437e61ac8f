"""The package, installed, against the conformance kit, as its author would run it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stack", ["ddp", pytest.param("ddp+bf16", marks=pytest.mark.full)])
def test_the_kit_is_green_from_an_empty_folder(tmp_path: Path, stack: str, conform) -> None:
    assert conform(tmp_path, stack).skipped == set()
