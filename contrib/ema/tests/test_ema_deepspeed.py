"""Under DeepSpeed the average is of what its optimizer steps: the fp32 masters, in 16 bits too."""

from __future__ import annotations

from typing import Any

import ema_problem as problem
import pytest
import torch

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.timeout(600)


def trained(run_processes, way: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_processes(problem.trained, way, {}, world=2, timeout=300)
    for each in found:
        torch.testing.assert_close(each["average"], each["formula"], rtol=1e-6, atol=1e-6)
        assert each["moved"] > 1e-3, "the average must differ from the weights to show anything"
        assert each["restored"]
        assert each["plain"], "evaluations outside have the trained weights"
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_average_is_that_of_whole_weights(stage: int, run_processes) -> None:
    for found in trained(run_processes, f"deepspeed-{stage}"):
        torch.testing.assert_close(*found["outputs"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_bfloat16_it_is_the_average_of_the_masters(stage: int, run_processes) -> None:
    for found in trained(run_processes, f"deepspeed-{stage}-bf16"):
        torch.testing.assert_close(*found["outputs"], rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("stage", [0, 2])
def test_weights_edited_in_place_outlast_an_evaluation_of_the_average(stage: int, run_processes) -> None:
    for edited, found in run_processes(problem.edited, f"deepspeed-{stage}-bf16", world=2, timeout=300):
        assert found == edited
