"""The README's example: the same numbers as plain PyTorch, and on two processes their mean."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(run_command, script: str, folder: Path, launcher: tuple[object, ...] = (sys.executable,)) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCEL__DEVICE": "cpu"}
    result = run_command(
        [*launcher, EXAMPLES / script],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=True,
    )
    return result.stdout


def test_one_process_prints_what_plain_pytorch_prints(tmp_path: Path, run_command):
    lines = printed(run_command, "minimal.py", tmp_path)

    assert lines.count("epoch") == 4
    assert lines == printed(run_command, "minimal_plain.py", tmp_path)


@pytest.mark.needs("accel-ddp")
def test_two_processes_print_the_mean_of_their_losses(tmp_path: Path, run_command):
    launcher = (Path(sys.executable).with_name("accel"), "launch", "-n", "2")

    assert printed(run_command, "minimal.py", tmp_path, launcher) == "".join(of_pairs_of_batches())


def of_pairs_of_batches():
    """What plain PyTorch prints in one process that steps after each two batches."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=4 * len(data) // 2)
    for epoch in range(4):
        batches = [*data]
        for pair in zip(batches[::2], batches[1::2], strict=True):
            loss = torch.stack([nn.functional.mse_loss(model(x), y) for x, y in pair]).mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        yield f"epoch {epoch + 1}: loss {loss.item():.3f}\n"
