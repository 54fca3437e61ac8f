"""`accel checkpoint` works on what `accel_core.storage.save` saved, without an Accelerator."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_core.storage import save


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints of a plain program, one step apart."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        save(state, checkpoint_id=tmp_path / f"step{step}")
    tmp_path.joinpath("weight.json").write_text(json.dumps(model.weight.tolist()))
    return tmp_path


def test_they_are_listed_with_their_steps_and_are_whole(accel, folder):
    rows = accel("checkpoint", "list", str(folder)).stdout.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["step1", "1"], ["step2", "2"]]
    assert accel("checkpoint", "verify", str(folder / "step2")).stdout.endswith("step2: OK\n")


def test_their_weights_are_exported_and_compared(accel, folder):
    accel("checkpoint", "export", str(folder / "step2"), str(folder / "out"))
    weight = load_file(folder / "out" / "model.safetensors")["weight"]
    assert weight.tolist() == json.loads((folder / "weight.json").read_text())
    told = accel("checkpoint", "diff", str(folder / "step1"), str(folder / "step2")).stdout
    assert "model: 2 of 2 tensors differ" in told
    assert "step: 1 -> 2" in told
