"""The package, installed, against the conformance kit, as its author would run it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_kit_is_green_for_a_strategy_that_places_by_plan(tmp_path: Path, conform) -> None:
    assert not conform(tmp_path, "dispatched", "--accel-world", "1").failed
