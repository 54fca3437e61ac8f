"""Processes end cleanly, whatever the user still holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from ddp_problem import accelerator, net

HOLDS_ITS_MODEL = """
import torch
from accel_core import Accelerator
accelerator = Accelerator(device="cpu")
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
{end}
"""


@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.full)])  # plain torch: 1 in 4 aborts
@pytest.mark.parametrize(
    "end",
    ["", pytest.param("accelerator.end_training()", marks=pytest.mark.full)],
    ids=["without end_training", "with it"],
)
def test_a_script_that_holds_its_model_to_the_end_exits_with_zero(
    end: str, times: int, tmp_path: Path, run_command
) -> None:
    script = tmp_path / "train.py"
    script.write_text(HOLDS_ITS_MODEL.format(end=end))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    for _ in range(times):
        result = run_command(command, capture_output=True, text=True, timeout=90, check=False)
        assert result.returncode == 0, result.stderr[-2000:]


def after_the_end() -> tuple[float, bool]:
    run = accelerator()
    model = run.prepare(net())
    inner = run.unwrap_model(model)
    run.end_training()
    return inner(torch.zeros(4, 6)).sum().item(), model.reducer is None


def test_the_users_own_module_works_on_after_the_end(run_processes) -> None:
    values = run_processes(after_the_end)

    assert [released for _, released in values] == [True, True]
    assert values[0][0] == values[1][0]
