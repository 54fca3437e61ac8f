"""A conversion needs memory for one tensor, however many there are."""

from __future__ import annotations

import sys

import opened
import pytest
import torch
from torch import nn

from accel_core import Accelerator

MEGABYTES = 32
"""Of each tensor. There are three of each of eight parameters."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(8, MEGABYTES << 15)) for _ in range(8))


def save(folder, value):
    """Save a checkpoint of an optimizer that has state."""
    accelerator, net = Accelerator(device="cpu"), Net()
    _, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
    for each in net.layers:
        each.grad = torch.full_like(each, value)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(folder)
    accelerator.end_training()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.full
def test_memory_is_that_of_some_tensors(tmp_path, run_command):
    save(tmp_path / "trained", 1.0)
    save(tmp_path / "fresh", 2.0)
    _, least = opened.watched(run_command, "show", tmp_path / "trained")
    peaks = {}

    def convert(*words):
        _, peaks[" ".join(map(str, words[:3]))] = opened.watched(run_command, *words)

    for name in ("accelerate", "dcp"):
        new = tmp_path / f"from {name}"
        convert("export", "--format", name, tmp_path / "trained", tmp_path / name)
        convert("import", "--format", name, tmp_path / name, new, "--like", tmp_path / "fresh")
        parts = "--only", "model", "--only", "optimizer"
        output, _ = opened.watched(run_command, "diff", tmp_path / "trained", new, *parts)
        assert output == "no difference\n"
    assert max(peaks.values()) <= least + 5 * MEGABYTES, (least, peaks)
