"""Training under every ZeRO stage is training in plain PyTorch, number by number."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from deepspeed_scenarios import SCENARIOS, run_all

pytestmark = pytest.mark.timeout(300)


@cache
def outcomes(run_processes, stage: int, world: int) -> list[dict[str, Any]]:
    return run_processes(run_all, stage, world=world, timeout=280)


@pytest.mark.parametrize("scenario", [each.__name__ for each in SCENARIOS])
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 1, 2, 3])
def test_it_is_what_plain_pytorch_does(stage: int, world: int, scenario: str, run_processes) -> None:
    for rank in outcomes(run_processes, stage, world):
        found = rank[scenario]
        assert not isinstance(found, str), found
        ours, plain = found
        assert ours == pytest.approx(plain, rel=1e-6, abs=1e-6)
