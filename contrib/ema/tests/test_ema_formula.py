"""The average equals the formula on whole weights, however they are sharded."""

from __future__ import annotations

from typing import Any

import ema_problem as problem
import pytest
import torch

WAYS = [
    "ddp",
    "fsdp",
    pytest.param("fsdp-1", marks=pytest.mark.full),
    "fsdp-tp",
]
OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "constant": {"decay": 0.5, "warmup": "none"},
    "power": {"decay": 0.9, "warmup": "power", "min_decay": 0.4},
    "seldom": {"update_after": 1, "update_every": 2, "decay": 0.7, "warmup": "none"},
}


def check(found: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert found["average"].keys() == found["formula"].keys()
    torch.testing.assert_close(found["average"], found["formula"], rtol=tolerance, atol=tolerance)
    assert found["moved"] > 1e-3, "the average must differ from the weights to show anything"
    assert found["restored"]


@pytest.mark.needs("accel-ddp", "accel-fsdp")
@pytest.mark.parametrize("way", WAYS)
def test_the_average_is_that_of_whole_weights(way: str, run_processes) -> None:
    for found in run_processes(problem.trained, way, OPTIONS["usual"], world=2):
        check(found)
        torch.testing.assert_close(*found["outputs"], rtol=1e-5, atol=1e-5)
        assert found["plain"], "evaluations outside have the trained weights"


@pytest.mark.parametrize("name", list(OPTIONS))
def test_each_schedule_is_followed(name: str) -> None:
    check(problem.trained("single", OPTIONS[name]))
