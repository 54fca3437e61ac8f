"""The package, installed, against the conformance kit, as its author would run it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from accel_core.testing import conform

with_ddp = pytest.mark.skipif(
    importlib.util.find_spec("accel_ddp") is None, reason="accel-ddp is not installed"
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stack", "worlds"),
    [("example", "1"), ("example+bf16", "1"), pytest.param("example+ddp", "1,2", marks=with_ddp)],
)
def test_the_kit_is_green_from_an_empty_folder(stack: str, worlds: str, tmp_path: Path) -> None:
    conform(tmp_path, stack, "--accel-world", worlds)


def test_a_script_trains_on_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch
from accel_core import Accelerator
accelerator = Accelerator(device="example")
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    loss = model(torch.ones(2, 4, device=accelerator.device)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print("trained on", accelerator.device)
"""
    )
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert result.stdout.splitlines()[-1:] == ["trained on example:0"], result.stderr
