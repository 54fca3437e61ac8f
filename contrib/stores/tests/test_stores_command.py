"""`accel checkpoint` on URLs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import stored_job as job
import torch
from s3_server import BUCKET, S3Server
from safetensors.torch import load_file


def accel(run_command, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accel_core", "checkpoint", *words]
    return run_command(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.full
@pytest.mark.needs("accel-checkpoint-tools")
def test_checkpoints_are_listed_verified_shown_and_exported(
    s3: S3Server, tmp_path: Path, run_command
) -> None:
    accelerator, model, optimizer = job.numbered(f"s3://{BUCKET}/run")
    for _ in range(2):
        job.step(accelerator, model, optimizer)
        accelerator.save_state()
    expected = job.weight(accelerator, model)
    accelerator.end_training()
    one = f"s3://{BUCKET}/run/checkpoints/checkpoint_1"

    listed = accel(run_command, "list", "--json", f"s3://{BUCKET}/run")
    assert listed.returncode == 0, listed.stderr
    assert [row["name"] for row in json.loads(listed.stdout)] == ["checkpoint_0", "checkpoint_1"]
    assert {row["valid"] for row in json.loads(listed.stdout)} == {"yes"}

    verified = accel(run_command, "verify", one)
    assert verified.stdout == f"{one}: OK\n", verified.stderr

    shown = accel(run_command, "show", one)
    assert shown.returncode == 0, shown.stderr
    assert "weight" in shown.stdout

    exported = accel(run_command, "export", one, str(tmp_path / "weights"))
    assert exported.returncode == 0, exported.stderr
    assert torch.equal(load_file(tmp_path / "weights" / "model.safetensors")["weight"], expected)

    target = f"{one.rpartition('/')[0]}/weights"
    assert accel(run_command, "export", one, target).returncode == 0
    again = accel(run_command, "export", one, target)
    assert again.returncode == 1
    assert "exists, and was left as it is\nexport to another folder, or remove it" in again.stderr
