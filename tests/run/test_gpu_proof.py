"""The script for a day with a GPU runs on a machine without one: to a clear message, and in rehearsal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_proof.py"


def prove(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_it_says_so():
    ended = prove()
    assert (ended.returncode, ended.stderr) == (2, "")
    assert ended.stdout.startswith("no accelerator: torch ")


@pytest.mark.simulated
def test_it_can_be_rehearsed_on_the_simulated_device():
    ended = prove("--device", "sim", "-k", "a step waits for nothing")
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("| ok | 8 batches |") == 3


@pytest.mark.simulated
def test_a_check_that_this_machine_cannot_make_says_why():
    ended = prove("--device", "sim", "-k", "pinned")
    assert ended.returncode == 0, ended.stdout
    assert "| not here | torch pins no memory for sim |" in ended.stdout
