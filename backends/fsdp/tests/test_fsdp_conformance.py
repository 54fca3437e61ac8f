"""The conformance kit, for both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_core.testing import conform


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_it_conforms(tmp_path: Path, version: int) -> None:
    options = ("--accel-level", "0,1,2,3", "--accel-set", f"fsdp.fsdp_version={version}")

    printed = conform(tmp_path, "fsdp", *options)

    # What only whole weights on each rank can show, in worlds of one and two.
    assert "0 failed, 0 xfailed, 10 skipped" in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", [2, 1])
def test_checkpoints_go_on_in_any_strategy_and_world(tmp_path: Path, version: int) -> None:
    options = ("--accel-level", "4", "--accel-set", f"fsdp.fsdp_version={version}")

    assert "0 failed, 0 xfailed, 0 skipped" in conform(tmp_path, "fsdp", *options)
