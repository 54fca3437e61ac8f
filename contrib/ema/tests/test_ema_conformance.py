"""The package, installed, against the conformance kit, as its author would run it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stack", ["ema", "ddp+ema", "fsdp+ema"])
def test_it_conforms(stack: str, tmp_path: Path, conform) -> None:
    assert not conform(tmp_path, stack).failed
