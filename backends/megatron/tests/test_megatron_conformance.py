"""The conformance kit, as far as it goes: its networks have no twin in megatron-core.

What its levels 2 to 4 ask is asked of models that have one: `test_megatron_training`, `_steps`, `_state`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_core.testing import conform


def test_the_package_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TEST_PRELOAD", "cuda_on_cpu_now")
    printed = conform(tmp_path, "megatron", "--accel-level", "0", path=[Path(__file__).parent])

    assert "0 failed, 0 xfailed" in printed
