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


DROPS_ITS_RUN = """
import atexit, gc, threading
import torch.distributed as dist

@atexit.register  # before the package is imported: runs after what the package does at exit
def tell():
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    print(f"at exit: group {dist.is_initialized()}, threads {others}")

import torch
from accel_core import Accelerator
from accel_core.errors import AccelError

def train():
    accelerator = Accelerator(device="cpu")
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        accelerator.gather(torch.ones(2 + accelerator.process_index))
    except AccelError:
        return
    raise SystemExit("the gather was not refused")

train()
gc.collect()
"""


def test_a_script_that_catches_a_refusal_and_drops_its_run_leaves_no_group_and_no_thread(
    tmp_path: Path, run_command
) -> None:
    script = tmp_path / "train.py"
    script.write_text(DROPS_ITS_RUN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = run_command([*launcher, str(script)], capture_output=True, text=True, timeout=90)

    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines() == 2 * ["at exit: group False, threads []"]


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
